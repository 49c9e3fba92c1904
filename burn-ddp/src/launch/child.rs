//! Inside a rank: dying with the launcher, and telling it what went wrong.

use super::{
    env,
    report::{Kind, Record},
};
use std::{
    any::Any,
    cell::RefCell,
    fmt::Display,
    fs::File,
    panic::{self, AssertUnwindSafe, PanicHookInfo, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, PoisonError},
};

/// How a rank tells its own failures from the consequences of another rank's.
#[derive(Debug)]
pub(super) struct Classify<E> {
    pub(super) error: fn(&E) -> bool,
    pub(super) panic: fn(&(dyn Any + Send)) -> Option<(String, bool)>,
}

thread_local! {
    /// The last panic that has begun on this thread.
    static LAST_PANIC: RefCell<Option<Record>> = const { RefCell::new(None) };
}

/// Runs `body` as a rank.
pub(super) fn run<E: Display>(
    classify: &Classify<E>,
    body: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    #[cfg(unix)]
    if !is_own_rank() {
        return body();
    }
    #[cfg(unix)]
    follow_launcher();
    let reporter = Reporter::open();
    reporter.hook(classify.panic);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            reporter.send(&Record::new(
                Kind::Error,
                &error.to_string(),
                (classify.error)(&error),
            ));
            Err(error)
        }
        Err(payload) => {
            // A payload raised with `resume_unwind` has passed no hook.
            let record = LAST_PANIC
                .take()
                .unwrap_or_else(|| describe(&*payload, None, classify.panic));
            reporter.send(&Record {
                kind: Kind::Panic,
                ..record
            });
            resume_unwind(payload)
        }
    }
}

fn describe(
    payload: &(dyn Any + Send),
    place: Option<String>,
    typed: fn(&(dyn Any + Send)) -> Option<(String, bool)>,
) -> Record {
    let (text, secondary) = typed(payload).unwrap_or_else(|| {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        (text.unwrap_or("a value that is not text").to_owned(), false)
    });
    let place = place
        .map(|place| format!(" at {place}"))
        .unwrap_or_default();
    Record::new(
        Kind::PanicBegun,
        &format!("panicked{place}: {text}"),
        secondary,
    )
}

/// The rank's end of its report pipe. Reporting is best effort: a rank whose launcher is gone has
/// nobody to tell.
#[derive(Clone)]
struct Reporter(Option<Arc<Mutex<File>>>);

impl Reporter {
    fn open() -> Self {
        let file = env::number(env::REPORT_FD)
            .and_then(|fd| File::options().write(true).open(inherited(fd)).ok());
        Self(file.map(|file| Arc::new(Mutex::new(file))))
    }

    fn send(&self, record: &Record) {
        if let Some(file) = &self.0 {
            let _ = record.write(&mut *file.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Reports each panic as it begins, because the process may not live to see it caught.
    fn hook(&self, typed: fn(&(dyn Any + Send)) -> Option<(String, bool)>) {
        let reporter = self.clone();
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            let record = describe(
                info.payload(),
                info.location().map(ToString::to_string),
                typed,
            );
            reporter.send(&record);
            // The thread may be past its thread-locals.
            let _ = LAST_PANIC.try_with(|last| last.replace(Some(record)));
            previous(info);
        }));
    }
}

/// Opens anew what the launcher left open under this number: the way to get at a pipe by its number without
/// taking it from somebody on trust (`from_raw_fd` is unsafe for that reason).
fn inherited(fd: u32) -> String {
    format!("/dev/fd/{fd}")
}

/// Makes sure that this rank and what it has started end with the launcher, even one that was killed.
///
/// The kernel's parent-death signal would end the rank alone and leave its own children behind. So a thread
/// waits for the end of a pipe that only the launcher holds open, and then kills the rank's whole
/// process group. The parent-death signal serves to wake a rank that is stopped.
#[cfg(unix)]
fn follow_launcher() {
    let watcher = env::number(env::LIFELINE_FD)
        .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotFound))
        .and_then(|fd| File::open(inherited(fd)))
        .and_then(|pipe| {
            std::thread::Builder::new()
                .name("launcher-watch".to_owned())
                .spawn(move || {
                    wait_for_end(pipe);
                    kill_group();
                })
        });
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        let signal = if watcher.is_ok() {
            Signal::CONT
        } else {
            Signal::KILL
        };
        let _ = set_parent_process_death_signal(Some(signal));
        // The launcher may have ended before the line above; without a watcher nobody would notice.
        if watcher.is_err() && env::number(env::LAUNCHER_PID) != parent() {
            kill_group();
        }
    }
    if let Err(error) = watcher {
        tracing::warn!(%error, "cannot watch the launcher; processes that this rank starts may outlive it");
    }
}

/// False in a program that a rank has started, which has inherited the variables but whose descriptors mean
/// other things. A rank that the launcher's death has orphaned already is still a rank, and ends in `follow_launcher`.
#[cfg(unix)]
fn is_own_rank() -> bool {
    use rustix::process::{Pid, getppid, test_kill_process};
    let launcher =
        env::number(env::LAUNCHER_PID).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    launcher == getppid() || launcher.is_some_and(|launcher| test_kill_process(launcher).is_err())
}

#[cfg(unix)]
fn wait_for_end(mut pipe: File) {
    use std::io::Read;
    loop {
        match pipe.read(&mut [0]) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // Nothing is ever written to it.
            _ => return,
        }
    }
}

#[cfg(target_os = "linux")]
fn parent() -> Option<u32> {
    rustix::process::getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok())
}

/// Kills this process and what it has started.
#[cfg(unix)]
fn kill_group() {
    use rustix::process::{Signal, getpgrp, getpid, kill_process, kill_process_group};
    // The launcher made us the leader of a group. If somebody has moved us to another, that one is not ours to kill.
    if getpgrp() == getpid() {
        let _ = kill_process_group(getpgrp(), Signal::KILL);
    }
    let _ = kill_process(getpid(), Signal::KILL);
}
