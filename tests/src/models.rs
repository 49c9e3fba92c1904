//! Small models.

use crate::oracle::floats;
use burn::module::Param;
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
    LinearConfig, PaddingConfig2d, Relu, Tanh,
    conv::{Conv2d, Conv2dConfig},
};
use burn::optim::GradientsParams;
use burn::prelude::*;

/// One scalar weight; the gradient of [`loss`](Self::loss) is `x`.
#[derive(Module, Debug)]
pub struct Scalar {
    /// The weight.
    pub w: Param<Tensor<1>>,
}

impl Scalar {
    /// A weight of value `w`.
    pub fn new(w: f32, device: &Device) -> Self {
        Self {
            w: Param::from_tensor(Tensor::from_data([w], device)),
        }
    }

    /// `w * x`.
    pub fn loss(&self, x: f32) -> Tensor<1> {
        self.w.val() * x
    }

    /// The gradient of `w`, if there is one.
    pub fn gradient(&self, grads: &GradientsParams) -> Option<f32> {
        grads.get::<1>(self.w.id).map(|g| floats(g)[0])
    }
}

/// Equal-shaped vectors, named `w.0`, `w.1` and so on.
#[derive(Module, Debug)]
pub struct Vectors {
    /// The vectors.
    pub w: Vec<Param<Tensor<1>>>,
}

impl Vectors {
    /// `count` vectors of `elements` zeros.
    pub fn new(count: usize, elements: usize, device: &Device) -> Self {
        let zeros = || Param::from_tensor(Tensor::zeros([elements], device));
        Self {
            w: (0..count).map(|_| zeros()).collect(),
        }
    }
}

/// `layers` times Linear(16,16) - ReLU.
#[derive(Module, Debug)]
pub struct Deep {
    /// The layers.
    pub layers: Vec<Linear>,
    act: Relu,
}

impl Deep {
    /// Random weights.
    pub fn new(layers: usize, device: &Device) -> Self {
        let layer = || LinearConfig::new(16, 16).init(device);
        Self {
            layers: (0..layers).map(|_| layer()).collect(),
            act: Relu::new(),
        }
    }

    /// `[batch, 16]` to `[batch, 16]`; `tap` sees the output of each layer and returns what the next one gets.
    pub fn forward(&self, x: Tensor<2>, tap: impl Fn(usize, Tensor<2>) -> Tensor<2>) -> Tensor<2> {
        let layers = self.layers.iter().enumerate();
        layers.fold(x, |x, (i, layer)| {
            tap(i, self.act.forward(layer.forward(x)))
        })
    }
}

/// Linear(8,16) - ReLU - Linear(16,4).
#[derive(Module, Debug)]
pub struct Mlp {
    /// First layer.
    pub a: Linear,
    /// Second layer.
    pub b: Linear,
    act: Relu,
}

impl Mlp {
    /// Random weights.
    pub fn new(device: &Device) -> Self {
        Self {
            a: LinearConfig::new(8, 16).init(device),
            b: LinearConfig::new(16, 4).init(device),
            act: Relu::new(),
        }
    }

    /// `[batch, 8]` to `[batch, 4]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.b.forward(self.act.forward(self.a.forward(x)))
    }
}

/// A trunk and two heads, of which a batch uses one.
#[derive(Module, Debug)]
pub struct TwoHeads {
    /// The shared part.
    pub trunk: Mlp,
    /// First head.
    pub a: Linear,
    /// Second head.
    pub b: Linear,
}

impl TwoHeads {
    /// Random weights.
    pub fn new(device: &Device) -> Self {
        Self {
            trunk: Mlp::new(device),
            a: LinearConfig::new(4, 2).init(device),
            b: LinearConfig::new(4, 2).init(device),
        }
    }

    /// `[batch, 8]` to `[batch, 2]` through head `a` or `b`.
    pub fn forward(&self, x: Tensor<2>, a: bool) -> Tensor<2> {
        let x = self.trunk.forward(x);
        if a {
            self.a.forward(x)
        } else {
            self.b.forward(x)
        }
    }
}

/// A recurrent cell: the same two matrices at every step.
#[derive(Module, Debug)]
pub struct Rnn {
    /// Input to hidden.
    pub input: Linear,
    /// Hidden to hidden.
    pub hidden: Linear,
    act: Tanh,
}

impl Rnn {
    /// Random weights.
    pub fn new(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(8, 4).init(device),
            hidden: LinearConfig::new(4, 4).init(device),
            act: Tanh::new(),
        }
    }

    /// `steps` steps on the same input `[batch, 8]`; the last hidden state `[batch, 4]`.
    pub fn forward(&self, x: Tensor<2>, steps: usize) -> Tensor<2> {
        let mut state = Tensor::zeros([x.dims()[0], 4], &x.device());
        for _ in 0..steps {
            state = self
                .act
                .forward(self.input.forward(x.clone()) + self.hidden.forward(state));
        }
        state
    }
}

/// Embedding and output layer share one matrix, used twice.
#[derive(Module, Debug)]
pub struct TiedLm {
    /// Both the embedding and the output matrix.
    pub embedding: Embedding,
    /// Between them.
    pub mix: Linear,
}

impl TiedLm {
    /// Random weights: 12 words, 8 dimensions.
    pub fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(12, 8).init(device),
            mix: LinearConfig::new(8, 8).init(device),
        }
    }

    /// Words `[batch, length]` to scores `[batch * length, 12]`.
    pub fn forward(&self, words: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = words.dims();
        let x = self.embedding.forward(words).reshape([batch * length, 8]);
        self.mix
            .forward(x)
            .matmul(self.embedding.weight.val().transpose())
    }
}

/// [`TiedLm`] with the shared matrix in two fields under one parameter id.
#[derive(Module, Debug)]
pub struct TwiceTiedLm {
    /// The embedding.
    pub embedding: Embedding,
    /// Between them.
    pub mix: Linear,
    /// The output matrix: the embedding's parameter.
    pub output: Param<Tensor<2>>,
}

impl TwiceTiedLm {
    /// Random weights: 12 words, 8 dimensions.
    pub fn new(device: &Device) -> Self {
        let TiedLm { embedding, mix } = TiedLm::new(device);
        Self {
            output: embedding.weight.clone(),
            embedding,
            mix,
        }
    }

    /// As [`TiedLm::forward`].
    pub fn forward(&self, words: Tensor<2, Int>) -> Tensor<2> {
        let [batch, length] = words.dims();
        let x = self.embedding.forward(words).reshape([batch * length, 8]);
        self.mix.forward(x).matmul(self.output.val().transpose())
    }
}

/// [`Mlp`], batch norm and dropout.
#[derive(Module, Debug)]
pub struct NormMlp {
    /// Both layers.
    pub mlp: Mlp,
    /// On the output.
    pub norm: BatchNorm,
    /// Between them.
    pub dropout: Dropout,
}

impl NormMlp {
    /// Random weights; half of the hidden values are dropped.
    pub fn new(device: &Device) -> Self {
        Self {
            mlp: Mlp::new(device),
            norm: BatchNormConfig::new(4).init(device),
            dropout: DropoutConfig::new(0.5).init(),
        }
    }

    /// `[batch, 8]` to `[batch, 4]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.norm.forward(self.dropout.forward(self.mlp.forward(x)))
    }
}

/// A residual network in miniature.
#[derive(Module, Debug)]
pub struct SmallResNet {
    stem: Conv2d,
    /// Normalisation of the stem.
    pub norm: BatchNorm,
    block: Conv2d,
    head: Linear,
    act: Relu,
}

impl SmallResNet {
    /// Random weights for images `[batch, 1, 8, 8]`.
    pub fn new(device: &Device) -> Self {
        let conv = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            stem: conv(1, 4),
            norm: BatchNormConfig::new(4).init(device),
            block: conv(4, 4),
            head: LinearConfig::new(4, 3).init(device),
            act: Relu::new(),
        }
    }

    /// Images to scores `[batch, 3]`. With `frozen`, batch norm uses its running statistics, which makes the
    /// result independent of how a batch is divided.
    pub fn forward(&self, x: Tensor<4>, frozen: bool) -> Tensor<2> {
        let x = self.stem.forward(x);
        let x = if frozen {
            self.frozen_norm(x)
        } else {
            self.norm.forward(x)
        };
        let x = self.act.forward(x);
        let x = self.act.forward(self.block.forward(x.clone()) + x);
        let pooled = x.mean_dims(&[2, 3]).reshape([-1, 4]);
        self.head.forward(pooled)
    }

    fn frozen_norm(&self, x: Tensor<4>) -> Tensor<4> {
        let shape = [1, 4, 1, 1];
        let mean = self.norm.running_mean.value_sync().reshape(shape);
        let deviation = (self.norm.running_var.value_sync() + 1e-5)
            .sqrt()
            .reshape(shape);
        (x - mean) / deviation * self.norm.gamma.val().reshape(shape)
            + self.norm.beta.val().reshape(shape)
    }
}
