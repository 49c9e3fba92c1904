//! A residual network with batch normalization (He et al., "Deep Residual Learning for Image
//! Recognition", 2016), in the form that is usual for small images: a 3x3 stem, no pooling
//! before the first stage.

use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::tensor::{Device, Tensor};

/// The shape of a [`ResNet`].
#[derive(Config, Debug)]
pub struct ResNetConfig {
    /// Colour channels of the images.
    pub channels: usize,
    /// Number of classes.
    pub classes: usize,
    /// Feature maps in each of the four stages; every stage after the first halves the image.
    #[config(default = "[64, 128, 256, 512]")]
    pub widths: [usize; 4],
    /// Residual blocks in each stage; the default of two makes the 18 layers of ResNet-18.
    #[config(default = "[2, 2, 2, 2]")]
    pub blocks: [usize; 4],
}

impl ResNetConfig {
    /// Builds the network with freshly drawn weights.
    pub fn init(&self, device: &Device) -> ResNet {
        let mut blocks = Vec::new();
        let mut channels = self.widths[0];
        for (stage, (&width, &count)) in self.widths.iter().zip(&self.blocks).enumerate() {
            for block in 0..count {
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                blocks.push(BasicBlock::new(channels, width, stride, device));
                channels = width;
            }
        }
        ResNet {
            stem: ConvNorm::new([self.channels, self.widths[0]], 3, 1, device),
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(channels, self.classes).init(device),
        }
    }
}

/// A residual network for classification.
#[derive(Module, Debug)]
pub struct ResNet {
    stem: ConvNorm,
    blocks: Vec<BasicBlock>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNet {
    /// Class scores (logits) `[batch, classes]` of the images `[batch, channels, height, width]`.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = Relu::new().forward(self.stem.forward(images));
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.pool.forward(x).flatten(1, 3))
    }
}

/// Two 3x3 convolutions around which the input is carried past.
#[derive(Module, Debug)]
struct BasicBlock {
    first: ConvNorm,
    second: ConvNorm,
    /// Brings the input to the output's shape where the block changes it.
    shortcut: Option<ConvNorm>,
}

impl BasicBlock {
    fn new(input: usize, output: usize, stride: usize, device: &Device) -> Self {
        Self {
            first: ConvNorm::new([input, output], 3, stride, device),
            second: ConvNorm::new([output, output], 3, 1, device),
            shortcut: (stride != 1 || input != output)
                .then(|| ConvNorm::new([input, output], 1, stride, device)),
        }
    }

    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let relu = Relu::new();
        let x = relu.forward(self.first.forward(input.clone()));
        let x = self.second.forward(x);
        let carried = match &self.shortcut {
            Some(shortcut) => shortcut.forward(input),
            None => input,
        };
        relu.forward(x + carried)
    }
}

/// A convolution without bias and the normalization that makes a bias pointless.
#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    fn new(channels: [usize; 2], kernel: usize, stride: usize, device: &Device) -> Self {
        let pad = kernel / 2;
        Self {
            conv: Conv2dConfig::new(channels, [kernel, kernel])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
                .with_bias(false)
                .with_initializer(Initializer::KaimingNormal {
                    gain: std::f64::consts::SQRT_2,
                    fan_out_only: true,
                })
                .init(device),
            norm: BatchNormConfig::new(channels[1]).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

#[cfg(all(test, feature = "flex"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use burn::module::Param;
    use burn::nn::loss::CrossEntropyLossConfig;
    use burn::optim::{GradientsParams, SgdConfig};
    use burn::tensor::{Int, TensorData};

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn is_the_resnet_18_for_small_images() {
        let net = ResNetConfig::new(3, 10).init(&Device::flex());
        // 11,173,962 weights, as in the usual implementations for CIFAR-10, and the running mean
        // and variance of 4,800 feature maps: 64 + 4*64 + 5*128 + 5*256 + 5*512.
        assert_eq!(net.num_params(), 11_173_962 + 2 * 4_800);
    }

    #[test]
    fn gives_one_score_a_class_for_any_image_size() {
        let device = Device::flex();
        for (size, channels, classes) in [(8, 1, 10), (9, 3, 4), (32, 3, 10)] {
            let net = ResNetConfig::new(channels, classes)
                .with_widths([2, 3, 4, 5])
                .init(&device);
            let scores = net.forward(Tensor::ones([2, channels, size, size], &device));
            assert_eq!(scores.dims(), [2, classes]);
        }
    }

    #[test]
    fn a_block_whose_branch_is_silent_passes_its_input_on() {
        let device = Device::flex();
        let mut block = BasicBlock::new(1, 1, 1, &device);
        block.second.norm.gamma = Param::from_tensor(Tensor::zeros([1], &device));
        let data = TensorData::new(vec![0.5f32, -1.0, 2.0, 0.0], [1, 1, 2, 2]);
        let output = block.forward(Tensor::from_data(data, &device));
        assert_eq!(values(output), [0.5, 0.0, 2.0, 0.0]);
    }

    #[test]
    fn a_block_that_halves_the_image_has_a_shortcut_of_its_own() {
        let device = Device::flex();
        let block = BasicBlock::new(2, 4, 2, &device);
        assert!(block.shortcut.is_some());
        let output = block.forward(Tensor::ones([3, 2, 8, 8], &device));
        assert_eq!(output.dims(), [3, 4, 4, 4]);
    }

    /// Black images make every feature zero, since convolutions have no bias and the normalization
    /// of zeros is zero. With a head of zeros the scores are then the head's bias alone, and two
    /// steps can be done by hand.
    #[test]
    fn two_steps_have_the_losses_worked_out_by_hand() {
        let device = Device::flex().autodiff();
        let mut net = ResNetConfig::new(1, 10)
            .with_widths([2, 2, 2, 2])
            .init(&device);
        net.head.weight = Param::from_tensor(Tensor::zeros([2, 10], &device));
        net.head.bias = Some(Param::from_tensor(Tensor::zeros([10], &device)));
        let criterion = CrossEntropyLossConfig::new().init(&device);
        let mut optim = SgdConfig::new().init();
        let images = Tensor::<4>::zeros([4, 1, 8, 8], &device);
        let labels = Tensor::<1, Int>::from_data([3, 3, 3, 7], &device);

        let mut losses = Vec::new();
        for _ in 0..2 {
            let loss = criterion.forward(net.forward(images.clone()), labels.clone());
            losses.push(loss.clone().into_scalar::<f32>());
            let grads = GradientsParams::from_grads(loss.backward(), &net);
            net = optim.step(1.0, net, grads);
        }

        // Ten equal scores: ln 10. Their gradient is 0.1 less the label's frequency, so with rate 1
        // the bias becomes 0.65 for class 3, 0.15 for class 7, -0.1 elsewhere, and the second loss is
        // ln(8 e^-0.1 + e^0.65 + e^0.15) - (0.75 * 0.65 + 0.25 * 0.15).
        assert!((losses[0] - 2.302_585).abs() < 1e-5, "{losses:?}");
        assert!((losses[1] - 1.808_703).abs() < 1e-5, "{losses:?}");
    }
}
