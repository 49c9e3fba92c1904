//! Which process listens on a port, as far as /proc shows it.

use std::fs;

/// State of a listening socket in /proc/net/tcp.
const LISTEN: &str = "0A";

/// ` by process 123 (name)`, or nothing if it cannot be seen (another user's, or no /proc).
pub(super) fn describe(port: u16) -> String {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
        .map(|path| fs::read_to_string(path).unwrap_or_default());
    let Some(inode) = tables.iter().find_map(|table| listening_inode(table, port)) else {
        return String::new();
    };
    match owner(inode) {
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!(" by process {pid} ({})", name.trim())
        }
        None => String::new(),
    }
}

/// Columns: number, local address, remote address, state, …, the tenth is the socket's inode.
fn listening_inode(table: &str, port: u16) -> Option<&str> {
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = columns.get(1)?.rsplit_once(':')?;
        let listens = u16::from_str_radix(local, 16).ok()? == port && *columns.get(3)? == LISTEN;
        listens.then(|| columns.get(9).copied()).flatten()
    })
}

fn owner(inode: &str) -> Option<u32> {
    let wanted = format!("socket:[{inode}]");
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let mut descriptors = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        descriptors
            .any(|fd| {
                fs::read_link(fd.path()).is_ok_and(|target| target.as_os_str() == wanted.as_str())
            })
            .then_some(pid)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_table_of_the_kernel() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:733C 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000        0 111 1 0 100 0 0 10 0\n   \
                     1: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 222 1 0 100 0 0 10 0\n";
        // 0x733C = 29500; the first line is a connection, not a listener.
        assert_eq!(listening_inode(table, 29500), Some("222"));
        assert_eq!(listening_inode(table, 29501), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = describe(listener.local_addr().unwrap().port());
        assert!(
            text.starts_with(&format!(" by process {} (", std::process::id())),
            "{text}"
        );
    }
}
