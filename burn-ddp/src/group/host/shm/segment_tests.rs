#![allow(clippy::unwrap_used)]

use super::{super::mock::MockControl, *};
use std::{thread, time::Duration};

type Make<'a> = &'a (dyn Fn() -> Result<Backing, String> + Sync);

/// Two ranks share a page; the places that rank 0 gave, and what the directory held after each exchange.
fn share(directory: &Path, make: Make<'_>) -> (Vec<Vec<u8>>, Vec<usize>) {
    let controls = MockControl::all(2, Duration::from_secs(60));
    let entries = || std::fs::read_dir(directory).unwrap().count();
    thread::scope(|scope| {
        let ranks: Vec<_> = controls
            .iter()
            .map(|control| {
                scope.spawn(move || {
                    let (mut places, mut counts) = (Vec::new(), Vec::new());
                    let mut exchange = |data: &[u8]| {
                        let all = control.exchange(0, data)?;
                        places.push(all[0].clone());
                        // Rank 1's answer keeps rank 0 from removing the file.
                        if control.rank() == 1 {
                            counts.push(entries());
                        }
                        control.exchange(1, &[])?;
                        Ok(all)
                    };
                    let rank = control.rank();
                    let segment = Segment::share(rank, directory, 4096, make, &mut exchange);
                    let segment = segment.unwrap().unwrap();
                    let own = rank * 8..rank * 8 + 8;
                    // SAFETY: each rank writes its own half before it meets the other, and both only read after that.
                    unsafe { segment.write(own) }.fill(rank as u8 + 1);
                    control.exchange(2, &[]).unwrap();
                    // SAFETY: as above.
                    let both = unsafe { segment.read(0..16) };
                    assert_eq!(both, [[1; 8], [2; 8]].concat());
                    (places, counts)
                })
            })
            .collect();
        let mut ranks = ranks.into_iter().map(|rank| rank.join().unwrap());
        (ranks.next().unwrap().0, ranks.next().unwrap().1)
    })
}

#[test]
fn ddp_35_a_segment_never_has_a_name() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let (places, entries) = share(directory.path(), &|| {
        Backing::nameless(directory.path(), 4096)
    });
    let place = String::from_utf8_lossy(&places[0]);
    let start = format!("\0/proc/{}/fd/", std::process::id());
    assert!(place.starts_with(&start), "{place}");
    assert_eq!(entries, [0, 0]);
}

#[test]
fn ddp_35_or_its_name_is_gone_when_all_have_mapped_it() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let (_, entries) = share(directory.path(), &|| {
        Backing::named(directory.path(), 7, 4096)
    });
    assert_eq!(entries, [1, 1]);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_descriptor_of_another_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let ours = Backing::nameless(directory.path(), 4096).unwrap();
    open(directory.path(), &ours.place, 4096).unwrap();
    for (place, bytes) in [
        (ours.place.as_str(), 8192),
        (&format!("{}1", ours.place), 4096),
        ("/proc/self/fd/0 inode 1", 4096),
        ("/proc/self/fd/x inode ", 4096),
    ] {
        assert!(open(directory.path(), place, bytes).is_err(), "{place}");
    }
}
