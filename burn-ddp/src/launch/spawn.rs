//! Starting the processes of the ranks.

use super::{
    LaunchError, env,
    output::{Tail, pump},
    report::Record,
    supervise::Event,
};
use std::{
    env as process_env,
    ffi::OsString,
    io::{self, IsTerminal, PipeReader, PipeWriter},
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::Sender,
    thread,
};

/// What all ranks of a launch have in common.
pub(super) struct Job {
    nproc: usize,
    program: PathBuf,
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, String)>,
    /// Rank 0's rendezvous socket, bound and listening before anything starts: no other program can take the
    /// port in between.
    #[cfg(unix)]
    listener: TcpListener,
    /// The ranks inherit the read end. The write end lives and dies with this process.
    #[cfg(unix)]
    lifeline: (PipeReader, PipeWriter),
    events: Sender<Event>,
}

/// A started rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) rank: usize,
    pub(super) child: Child,
    pub(super) tail: Tail,
    /// Threads that read from it, each of which sends [`Event::ReaderDone`] at the end.
    pub(super) readers: usize,
}

impl Job {
    pub(super) fn new(nproc: usize, events: Sender<Event>) -> Result<Self, LaunchError> {
        let program = process_env::current_exe().map_err(setup("the path of this executable"))?;
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(setup("a port on 127.0.0.1"))?;
        let port = listener
            .local_addr()
            .map_err(setup("the port's number"))?
            .port();
        let (cores, threads, unset) = env::threads(nproc);
        if !unset.is_empty() {
            tracing::info!(
                "{nproc} ranks on {cores} cores, {threads} thread(s) each ({})",
                unset.join(", ")
            );
        }
        let mut variables = vec![
            (env::WORLD_SIZE, nproc.to_string()),
            (env::LOCAL_WORLD_SIZE, nproc.to_string()),
            (env::MASTER_ADDR, "127.0.0.1".to_owned()),
            (env::MASTER_PORT, port.to_string()),
            (
                env::SECRET,
                env::secret().map_err(setup("random bytes for the job's secret"))?,
            ),
            (env::LAUNCHER_PID, std::process::id().to_string()),
        ];
        variables.extend(unset.into_iter().map(|name| (name, threads.to_string())));
        Ok(Self {
            nproc,
            program,
            arguments: process_env::args_os().skip(1).collect(),
            variables,
            #[cfg(unix)]
            listener,
            #[cfg(unix)]
            lifeline: io::pipe().map_err(setup("a pipe"))?,
            events,
        })
    }

    /// Starts all ranks, or none.
    pub(super) fn start(&self) -> Result<Vec<Rank>, LaunchError> {
        let mut ranks = Vec::with_capacity(self.nproc);
        for rank in 0..self.nproc {
            match self.start_rank(rank) {
                Ok(started) => ranks.push(started),
                Err(cause) => {
                    for Rank { child, .. } in &mut ranks {
                        super::process::kill(child);
                        let _ = child.wait();
                    }
                    let (program, cause) = (self.program.display().to_string(), cause.to_string());
                    return Err(LaunchError::Spawn {
                        rank,
                        program,
                        cause,
                    });
                }
            }
        }
        Ok(ranks)
    }

    fn start_rank(&self, rank: usize) -> io::Result<Rank> {
        let (report, report_writer) = io::pipe()?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
            .env(env::RANK, rank.to_string())
            .env(env::LOCAL_RANK, rank.to_string());
        if rank == 0 {
            // Rank 0 has the user's own output, so that progress bars see their terminal and the last line is the
            // program's. It is in a background process group, so reading from a terminal would stop it.
            if io::stdin().is_terminal() {
                command.stdin(Stdio::null());
            }
        } else {
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
        }
        let mut child = self.spawn(&mut command, rank, &report_writer)?;
        drop(report_writer);

        let tail = Tail::default();
        let mut readers = 1;
        let started = self
            .reader(rank, "report", move |rank, events| {
                forward(report, rank, events)
            })
            .and_then(|()| {
                // On a terminal, rank 0 may have left a progress bar on the line.
                let prefix = |terminal| match terminal {
                    true => format!("\r\x1b[2K[rank {rank}] "),
                    false => format!("[rank {rank}] "),
                };
                if let Some(stdout) = child.stdout.take() {
                    let prefix = prefix(io::stdout().is_terminal());
                    readers += 1;
                    self.reader(rank, "stdout", move |_, _| {
                        pump(stdout, io::stdout(), &prefix, None)
                    })?;
                }
                if let Some(stderr) = child.stderr.take() {
                    let prefix = prefix(io::stderr().is_terminal());
                    let tail = tail.clone();
                    readers += 1;
                    self.reader(rank, "stderr", move |_, _| {
                        pump(stderr, io::stderr(), &prefix, Some(&tail))
                    })?;
                }
                Ok(())
            });
        if let Err(error) = started {
            super::process::kill(&mut child);
            let _ = child.wait();
            return Err(error);
        }
        Ok(Rank {
            rank,
            child,
            tail,
            readers,
        })
    }

    fn reader(
        &self,
        rank: usize,
        what: &str,
        read: impl FnOnce(usize, &Sender<Event>) + Send + 'static,
    ) -> io::Result<()> {
        let events = self.events.clone();
        thread::Builder::new()
            .name(format!("rank-{rank}-{what}"))
            .spawn(move || {
                read(rank, &events);
                let _ = events.send(Event::ReaderDone);
            })?;
        Ok(())
    }

    #[cfg(unix)]
    fn spawn(&self, command: &mut Command, rank: usize, report: &PipeWriter) -> io::Result<Child> {
        use std::{
            os::{
                fd::{AsFd, AsRawFd},
                unix::process::CommandExt,
            },
            sync::{Mutex, PoisonError},
        };
        /// One launch of this process at a time has inheritable descriptors.
        static INHERITABLE: Mutex<()> = Mutex::new(());

        // A group of its own: Ctrl-C reaches the launcher alone, which passes it on, and what the rank
        // starts can be ended with it.
        command.process_group(0);
        command.env(env::LIFELINE_FD, self.lifeline.0.as_raw_fd().to_string());
        command.env(env::REPORT_FD, report.as_raw_fd().to_string());
        let mut descriptors = vec![self.lifeline.0.as_fd(), report.as_fd()];
        if rank == 0 {
            command.env(env::LISTEN_FD, self.listener.as_raw_fd().to_string());
            descriptors.push(self.listener.as_fd());
        }
        let _guard = INHERITABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let _inheritable = Inheritable::new(descriptors)?;
        command.spawn()
    }

    /// Sockets cannot be handed over here: the listener is closed and rank 0 binds the port anew.
    #[cfg(not(unix))]
    fn spawn(
        &self,
        command: &mut Command,
        _rank: usize,
        _report: &PipeWriter,
    ) -> io::Result<Child> {
        command.spawn()
    }
}

/// Makes descriptors survive `exec` while it lives. A process that another thread of this
/// program starts in that moment would get them too, so it lives for one spawn.
#[cfg(unix)]
struct Inheritable<'a>(Vec<std::os::fd::BorrowedFd<'a>>);

#[cfg(unix)]
impl<'a> Inheritable<'a> {
    fn new(descriptors: Vec<std::os::fd::BorrowedFd<'a>>) -> io::Result<Self> {
        let guard = Self(descriptors);
        for descriptor in &guard.0 {
            rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty())?;
        }
        Ok(guard)
    }
}

#[cfg(unix)]
impl Drop for Inheritable<'_> {
    fn drop(&mut self) {
        for descriptor in &self.0 {
            let _ = rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::CLOEXEC);
        }
    }
}

/// Passes a rank's reports on until its pipe closes or says something that is none.
fn forward(mut report: PipeReader, rank: usize, events: &Sender<Event>) {
    while let Ok(Some(record)) = Record::read(&mut report) {
        if events.send(Event::Report(rank, record)).is_err() {
            return;
        }
    }
}

pub(super) fn setup(what: &'static str) -> impl Fn(io::Error) -> LaunchError {
    move |error| LaunchError::Setup {
        what,
        cause: error.to_string(),
    }
}
