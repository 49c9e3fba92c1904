//! ncclGroupStart and ncclGroupEnd: what a thread has called in between.

use crate::{
    code::{IN_PROGRESS, INVALID_USAGE, SUCCESS},
    comm::Comm,
    operation::Operation,
    registry,
    worker::Job,
};
use std::{cell::RefCell, ffi::c_int, mem, sync::Arc};

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

#[derive(Default)]
struct Group {
    depth: usize,
    error: c_int,
    calls: Vec<(Arc<Comm>, Operation, usize)>,
}

pub(crate) fn start() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

pub(crate) fn end() -> c_int {
    let group = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            registry::breach("ncclGroupEnd without a start");
            return None;
        }
        group.depth -= 1;
        (group.depth == 0).then(|| mem::take(group))
    });
    match group {
        None => SUCCESS,
        Some(group) if group.error != SUCCESS => group.error,
        Some(group) => post(group.calls),
    }
}

/// An error within a group is what its end returns.
pub(crate) fn error(code: c_int) -> c_int {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error = code;
        }
    });
    code
}

/// Takes a call, for now or for the end of the group.
pub(crate) fn add(comm: Arc<Comm>, operation: Operation, stream: usize) -> c_int {
    let open = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.calls.push((comm.clone(), operation, stream));
        }
        group.depth > 0
    });
    if open {
        return SUCCESS;
    }
    post(vec![(comm, operation, stream)])
}

/// One communicator and one stream in a group are enough here.
fn post(calls: Vec<(Arc<Comm>, Operation, usize)>) -> c_int {
    let Some((comm, _, stream)) = calls.first() else {
        return SUCCESS;
    };
    let (comm, stream) = (comm.clone(), *stream);
    if calls
        .iter()
        .any(|call| !Arc::ptr_eq(&call.0, &comm) || call.2 != stream)
    {
        registry::breach("several communicators or streams in a group, which the mock has not");
        return INVALID_USAGE;
    }
    let operations = calls.into_iter().map(|call| call.1).collect();
    comm.submit(Job::Post { operations, stream });
    IN_PROGRESS
}
