#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| burn_ddp_fuzz::run("report", input));
