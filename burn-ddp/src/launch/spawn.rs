//! Starting the processes of the ranks.

#[cfg(unix)]
use super::guard::Guard;
use super::{
    LaunchError, Outcome, env,
    output::{Copies, Log, Tail, pump},
    plan::Plan,
    report::Record,
    supervise::Event,
};
use std::{
    io::{self, IsTerminal, PipeReader, PipeWriter},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc::Sender},
    thread,
};

/// A plan that is being carried out.
pub(super) struct Job {
    plan: Plan,
    variables: Vec<(&'static str, String)>,
    /// The ranks inherit the read end. The write end lives and dies with this process.
    #[cfg(unix)]
    lifeline: (PipeReader, PipeWriter),
    #[cfg(unix)]
    guard: Option<Arc<Guard>>,
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
    #[cfg(unix)]
    guard: Option<Arc<Guard>>,
}

impl Rank {
    /// How the process has ended, if it has; then what is left of its group is killed.
    pub(super) fn reap(&mut self) -> Option<Outcome> {
        #[cfg(unix)]
        let (guard, leader) = (&self.guard, self.child.id());
        super::process::reap(&mut self.child, || {
            #[cfg(unix)]
            if let Some(guard) = guard {
                guard.forget(leader);
            }
        })
    }

    /// Kills it with its group, whatever it is doing.
    pub(super) fn end(&mut self) {
        super::process::kill(&mut self.child);
        #[cfg(unix)]
        if let Some(guard) = &self.guard {
            guard.forget(self.child.id());
        }
        let _ = self.child.wait();
    }
}

impl Job {
    pub(super) fn new(plan: Plan, events: Sender<Event>) -> Result<Self, LaunchError> {
        let nproc = plan.ranks.len();
        let (cores, threads, unset) = env::threads(nproc);
        if !unset.is_empty() {
            tracing::info!(
                "{nproc} ranks on {cores} cores, {threads} thread(s) each ({})",
                unset.join(", ")
            );
        }
        let mut variables = vec![
            (env::WORLD_SIZE, plan.world_size.to_string()),
            (env::LOCAL_WORLD_SIZE, nproc.to_string()),
            (env::LAUNCHER_PID, std::process::id().to_string()),
        ];
        variables.extend(plan.master.variables()?);
        variables.extend(plan.variables.iter().cloned());
        variables.extend(unset.into_iter().map(|name| (name, threads.to_string())));
        Ok(Self {
            plan,
            variables,
            #[cfg(unix)]
            lifeline: io::pipe().map_err(setup("a pipe"))?,
            #[cfg(unix)]
            guard: None,
            events,
        })
    }

    /// With a process that ends the ranks when this one cannot.
    #[cfg(all(unix, feature = "cli"))]
    pub(super) fn guarded(mut self, guard: Arc<Guard>) -> Self {
        self.guard = Some(guard);
        self
    }

    /// Starts all ranks, or none.
    pub(super) fn start(&self) -> Result<Vec<Rank>, LaunchError> {
        let mut ranks = Vec::with_capacity(self.plan.ranks.len());
        let logs = self.logs()?;
        for (rank, log) in self.plan.ranks.clone().zip(logs) {
            match self.start_rank(rank, log) {
                Ok(started) => ranks.push(started),
                Err(cause) => {
                    ranks.iter_mut().for_each(Rank::end);
                    let program = self.plan.program.display().to_string();
                    let cause = explain(Path::new(&self.plan.program), &cause);
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

    /// One for each rank, made before any of them starts.
    fn logs(&self) -> Result<Vec<Option<Log>>, LaunchError> {
        let ranks = self.plan.ranks.clone();
        let Some(folder) = &self.plan.logs else {
            return Ok(ranks.map(|_| None).collect());
        };
        let failed = |path: &Path, error: io::Error| LaunchError::Log {
            path: path.display().to_string(),
            cause: error.to_string(),
        };
        std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        let log = |rank| {
            let path = folder.join(format!("rank-{rank}.log"));
            let log = Log::create(&path).map_err(|error| failed(&path, error))?;
            Ok(Some(log))
        };
        ranks.map(log).collect()
    }

    fn start_rank(&self, rank: usize, log: Option<Log>) -> io::Result<Rank> {
        let (report, report_writer) = io::pipe()?;
        let mut command = Command::new(&self.plan.program);
        command
            .args(&self.plan.arguments)
            .envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
            .env(env::RANK, rank.to_string())
            .env(env::LOCAL_RANK, (rank - self.plan.ranks.start).to_string());
        if rank == 0 {
            // Rank 0 has the user's own output, so that progress bars see their terminal and the last line is the
            // program's. It is in a background process group, so reading from a terminal would stop it.
            if io::stdin().is_terminal() {
                command.stdin(Stdio::null());
            }
        } else {
            command.stdin(Stdio::null());
        }
        if rank != 0 || log.is_some() {
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
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
                let prefix = |terminal| match (rank, terminal) {
                    (0, _) => String::new(),
                    (_, true) => format!("\r\x1b[2K[rank {rank}] "),
                    (_, false) => format!("[rank {rank}] "),
                };
                if let Some(stdout) = child.stdout.take() {
                    let prefix = prefix(io::stdout().is_terminal());
                    let copies = Copies {
                        tail: None,
                        log: log.clone(),
                    };
                    readers += 1;
                    self.reader(rank, "stdout", move |_, _| {
                        pump(stdout, io::stdout(), &prefix, &copies)
                    })?;
                }
                if let Some(stderr) = child.stderr.take() {
                    let prefix = prefix(io::stderr().is_terminal());
                    let copies = Copies {
                        tail: Some(tail.clone()),
                        log,
                    };
                    readers += 1;
                    self.reader(rank, "stderr", move |_, _| {
                        pump(stderr, io::stderr(), &prefix, &copies)
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
            #[cfg(unix)]
            guard: self.guard.clone(),
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
        match self.plan.master.listener(rank) {
            Some(listener) => {
                command.env(env::LISTEN_FD, listener.as_raw_fd().to_string());
                descriptors.push(listener.as_fd());
            }
            // That of a launcher around this one means nothing here.
            None => drop(command.env_remove(env::LISTEN_FD)),
        }
        let _one = INHERITABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let _inheritable = Inheritable::new(descriptors)?;
        let child = command.spawn()?;
        if let Some(guard) = &self.guard {
            guard.watch(child.id());
        }
        Ok(child)
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

/// The system says "no such file", not which one.
fn explain(program: &Path, cause: &io::Error) -> String {
    if cause.kind() != io::ErrorKind::NotFound {
        return cause.to_string();
    }
    // Without a folder in it, it is looked up.
    if program
        .parent()
        .is_some_and(|folder| folder.as_os_str().is_empty())
    {
        let name = program.display();
        return format!(
            "the program was not found: no {name} in PATH. A program in this folder is ./{name}"
        );
    }
    let path = std::path::absolute(program).unwrap_or_else(|_| program.into());
    match program.exists() {
        false => format!("the program was not found: there is no {}", path.display()),
        true => format!(
            "{} is there, but not what its first line says to run it with",
            path.display()
        ),
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
