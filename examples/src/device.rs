//! `--device`: a Burn device by name.

use burn::tensor::Device;

/// The devices that the command line knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceName {
    /// The CPU, through Burn's own portable backend.
    Flex,
    /// A GPU through Vulkan, Metal or DirectX.
    Wgpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// The program was built without the backend that was asked for.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this program was built without the device `{name}`; build it with `--features {name}`: \
     `cargo run --release --features {name} --example {program} -- --device {name}`"
)]
pub struct DeviceError {
    name: &'static str,
    /// The example's name.
    program: String,
}

impl DeviceError {
    #[allow(dead_code)] // in a program with all devices
    fn new(name: &'static str) -> Self {
        let path = std::env::current_exe().unwrap_or_default();
        let program = path.file_stem().unwrap_or_default();
        let program = program.to_string_lossy().into_owned();
        Self { name, program }
    }
}

impl DeviceName {
    /// Opens the default device of this kind, without autodiff.
    ///
    /// # Errors
    ///
    /// When the backend is not compiled in.
    pub fn open(self) -> Result<Device, DeviceError> {
        match self {
            #[cfg(feature = "flex")]
            Self::Flex => Ok(Device::flex()),
            #[cfg(not(feature = "flex"))]
            Self::Flex => Err(DeviceError::new("flex")),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => Err(DeviceError::new("wgpu")),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::cuda(burn::tensor::DeviceIndex::Default)),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(DeviceError::new("cuda")),
        }
    }
}

#[cfg(all(test, not(feature = "wgpu")))]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_built_in_says_how_to_get_it() {
        assert_eq!(
            DeviceName::Wgpu.open().err(),
            Some(DeviceError::new("wgpu"))
        );
        let error = DeviceError {
            name: "wgpu",
            program: "char_lm_ddp".into(),
        };
        let command =
            "`cargo run --release --features wgpu --example char_lm_ddp -- --device wgpu`";
        assert!(error.to_string().ends_with(command), "{error}");
    }
}
