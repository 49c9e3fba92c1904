//! ncclGetLastError.

use std::{
    ffi::{CString, c_char},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

static LAST: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// The text stays for ever, as the caller may be reading it.
pub(crate) fn set(message: &str) {
    let message = CString::new(message).unwrap_or_default();
    LAST.store(message.into_raw(), Ordering::Release);
}

pub(crate) fn last() -> *const c_char {
    let last = LAST.load(Ordering::Acquire);
    if last.is_null() { c"".as_ptr() } else { last }
}
