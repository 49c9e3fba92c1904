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
    "this program was built without the device `{name}`; build it with `--features {name}` \
     (for example `cargo run --release --features {name} --example resnet_ddp -- --device {name}`)"
)]
pub struct DeviceError {
    name: &'static str,
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
            Self::Flex => Err(DeviceError { name: "flex" }),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Ok(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice)),
            #[cfg(not(feature = "wgpu"))]
            Self::Wgpu => Err(DeviceError { name: "wgpu" }),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::cuda(burn::tensor::DeviceIndex::Default)),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err(DeviceError { name: "cuda" }),
        }
    }
}

#[cfg(all(test, not(feature = "wgpu")))]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_built_in_says_how_to_get_it() {
        let error = DeviceName::Wgpu.open().err();
        assert_eq!(error, Some(DeviceError { name: "wgpu" }));
        assert!(error.is_some_and(|e| e.to_string().contains("--features wgpu")));
    }
}
