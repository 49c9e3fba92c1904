//! The devices to test on.

use burn_ddp_cuda::kernels::{DType, supports};
use cubecl::{Device, client::Client};

/// Set to `required` where the tests must not pass by being skipped.
const REQUIRED: &str = "BURN_DDP_TEST_GPU";

fn skip(why: &str) {
    let required = std::env::var(REQUIRED).is_ok_and(|value| value == "required");
    assert!(!required, "{REQUIRED}=required, but {why}");
    eprintln!("skipped: {why}");
}

/// A device of each runtime that was built in, or the reason why there is none.
fn devices() -> Vec<Result<Device, String>> {
    let mut devices = Vec::new();
    if cfg!(feature = "wgpu") {
        devices.push(Device::wgpu(Default::default()));
    }
    if cfg!(feature = "cpu") {
        devices.push(Device::cpu());
    }
    if cfg!(feature = "cuda") {
        devices.push(Device::cuda(0));
    }
    devices
        .into_iter()
        .map(|device| device.map_err(|e| e.to_string()))
        .collect()
}

/// Runs a test on each device, or [skips](skip) it.
pub(crate) fn on_each(test: impl Fn(&Client)) {
    let devices = devices();
    if devices.is_empty() {
        skip("no runtime was built in: choose a feature");
    }
    for device in devices {
        match device {
            Ok(device) => {
                let client = device.client();
                eprintln!("on {} with {:?}", client.name(), dtypes(&client));
                test(&client);
            }
            Err(why) => skip(&why),
        }
    }
}

/// The types that the device has.
pub(crate) fn dtypes(client: &Client) -> Vec<DType> {
    DType::ALL
        .into_iter()
        .filter(|&dtype| supports(client, dtype))
        .collect()
}

/// The pairs of types that values are cast between on the device.
pub(crate) fn casts(client: &Client) -> Vec<(DType, DType)> {
    let dtypes = dtypes(client);
    let pairs = dtypes
        .iter()
        .flat_map(|&from| dtypes.iter().map(move |&to| (from, to)));
    pairs.filter(|(from, to)| from.casts_to(*to)).collect()
}

/// Runs this test binary again, where there is no device.
#[test]
fn a_test_without_a_device_is_skipped_unless_it_must_run() {
    if !cfg!(feature = "wgpu") || cfg!(feature = "cpu") || cfg!(feature = "cuda") {
        return; // the others do not need a driver that can be hidden
    }
    for (required, success, said) in [
        ("", true, "skipped: "),
        ("required", false, "BURN_DDP_TEST_GPU=required, but "),
    ] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "packing::empty_and_single_elements",
                "--nocapture",
            ])
            .env("VK_ICD_FILENAMES", "/nonexistent")
            .env("VK_DRIVER_FILES", "/nonexistent")
            .env("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent")
            .env(REQUIRED, required)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), success, "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
    }
}
