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
