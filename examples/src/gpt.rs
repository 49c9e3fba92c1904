//! A small transformer decoder in the form of GPT-2 (Radford et al., "Language Models are
//! Unsupervised Multitask Learners", 2019): normalization before each part, learned positions, and
//! the token embedding as the output layer. Linear layers have no bias.

use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Distribution, Int, Tensor, TensorData};

/// Standard deviation of freshly drawn weights.
const STD: f64 = 0.02;

/// The shape of a [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocabulary: usize,
    /// Longest sequence.
    pub context: usize,
    /// Blocks of attention and feed-forward layers.
    #[config(default = 3)]
    pub layers: usize,
    /// Size of a token's vector; a multiple of `heads`.
    #[config(default = 128)]
    pub width: usize,
    /// Attention heads of each block.
    #[config(default = 4)]
    pub heads: usize,
    /// Share of the activations that are dropped in training.
    #[config(default = 0.0)]
    pub dropout: f64,
}

impl GptConfig {
    /// Builds the model with freshly drawn weights.
    pub fn init(&self, device: &Device) -> Gpt {
        Gpt {
            tokens: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(normal(STD))
                .init(device),
            positions: normal(STD).init([self.context, self.width], device),
            dropout: DropoutConfig::new(self.dropout).init(),
            blocks: (0..self.layers).map(|_| Block::new(self, device)).collect(),
            norm: LayerNormConfig::new(self.width).init(device),
        }
    }

    fn linear(&self, input: usize, output: usize, std: f64, device: &Device) -> Linear {
        LinearConfig::new(input, output)
            .with_bias(false)
            .with_initializer(normal(std))
            .init(device)
    }

    /// Layers that write into the stream past which the blocks lie draw smaller weights, so that it does not grow with their number.
    fn residual_std(&self) -> f64 {
        STD / (2.0 * self.layers as f64).sqrt()
    }
}

fn normal(std: f64) -> Initializer {
    Initializer::Normal { mean: 0.0, std }
}

/// A language model: for each token of a sequence, scores of the next one.
#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Param<Tensor<2>>,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

impl Gpt {
    /// Scores (logits) `[batch, length, vocabulary]` of what follows each of `tokens` `[batch, length]`, given it and those before it.
    ///
    /// `length` is at most the context.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let positions = self.positions.val().narrow(0, 0, length).unsqueeze();
        let x = self
            .dropout
            .forward(self.tokens.forward(tokens) + positions);
        let future = Tensor::<2, Bool>::tril_mask([length, length], 0, &x.device());
        let x = (self.blocks.iter()).fold(x, |x, block| block.forward(x, &future));
        let scores = self.tokens.weight.val().transpose().unsqueeze();
        self.norm.forward(x).matmul(scores)
    }

    /// `count` tokens that go on after `prompt` (at least one token), each drawn with probabilities `softmax(scores / temperature)`; at temperature 0 the likeliest one.
    ///
    /// Draws from the device's generator. Call it on `model.valid()`.
    pub fn sample(&self, prompt: &[i32], count: usize, temperature: f64) -> Vec<i32> {
        let [context, _] = self.positions.dims();
        let device = self.positions.device();
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let seen = &tokens[tokens.len().saturating_sub(context)..];
            let input = TensorData::new(seen.to_vec(), [1, seen.len()]);
            let scores = self.forward(Tensor::from_data(input, &device));
            let last = scores.narrow(1, seen.len() - 1, 1).flatten::<1>(0, 2);
            let next = draw(last, temperature).into_scalar::<i32>();
            tokens.push(next);
        }
        tokens.split_off(prompt.len())
    }
}

/// The largest score after Gumbel noise has been added is a draw from their softmax (Maddison, Tarlow, Minka, "A* Sampling", 2014, section 2).
fn draw(scores: Tensor<1>, temperature: f64) -> Tensor<1, Int> {
    if temperature == 0.0 {
        return scores.argmax(0);
    }
    let uniform = Tensor::random(
        scores.dims(),
        Distribution::Uniform(0.0, 1.0),
        &scores.device(),
    );
    let gumbel = -(-uniform.log()).log();
    (scores / temperature + gumbel).argmax(0)
}

/// Attention over the sequence, then a feed-forward layer at each place of it; both add to what they are given.
#[derive(Module, Debug)]
struct Block {
    attention_norm: LayerNorm,
    attention: Attention,
    feed_norm: LayerNorm,
    expand: Linear,
    contract: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let width = config.width;
        Self {
            attention_norm: LayerNormConfig::new(width).init(device),
            attention: Attention::new(config, device),
            feed_norm: LayerNormConfig::new(width).init(device),
            expand: config.linear(width, 4 * width, STD, device),
            contract: config.linear(4 * width, width, config.residual_std(), device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>, future: &Tensor<2, Bool>) -> Tensor<3> {
        let attended = (self.attention).forward(self.attention_norm.forward(x.clone()), future);
        let x = x + self.dropout.forward(attended);
        let hidden = Gelu::new().forward(self.expand.forward(self.feed_norm.forward(x.clone())));
        x + self.dropout.forward(self.contract.forward(hidden))
    }
}

/// Causal self-attention with several heads (Vaswani et al., "Attention Is All You Need", 2017, section 3.2).
#[derive(Module, Debug)]
struct Attention {
    /// Queries, keys and values side by side.
    project: Linear,
    output: Linear,
    dropout: Dropout,
    heads: usize,
}

impl Attention {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let width = config.width;
        Self {
            project: config.linear(width, 3 * width, STD, device),
            output: config.linear(width, width, config.residual_std(), device),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
        }
    }

    /// `future` is true where a place (row) must not look.
    fn forward(&self, x: Tensor<3>, future: &Tensor<2, Bool>) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let size = width / self.heads;
        let projected = self.project.forward(x);
        let heads = |at: usize| {
            (projected.clone().narrow(2, at * width, width))
                .reshape([batch, length, self.heads, size])
                .swap_dims(1, 2)
        };
        let (queries, keys, values) = (heads(0), heads(1), heads(2));
        let scores = queries.matmul(keys.transpose()) / (size as f64).sqrt();
        let scores = scores.mask_fill(future.clone().unsqueeze(), f32::NEG_INFINITY);
        let weights = self.dropout.forward(softmax(scores, 3));
        let mixed = (weights.matmul(values).swap_dims(1, 2)).reshape([batch, length, width]);
        self.output.forward(mixed)
    }
}

#[cfg(all(test, feature = "flex"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn small() -> Gpt {
        let device = Device::flex();
        device.seed(1);
        let config = GptConfig::new(7, 5).with_layers(2).with_width(8);
        config.with_heads(2).init(&device)
    }

    fn scores(model: &Gpt, tokens: [i32; 5]) -> Vec<f32> {
        let tokens = TensorData::new(tokens.to_vec(), [1, 5]);
        let scores = model.forward(Tensor::from_data(tokens, &Device::flex()));
        assert_eq!(scores.dims(), [1, 5, 7]);
        scores.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn no_place_sees_what_comes_after_it() {
        let model = small();
        let one = scores(&model, [1, 2, 3, 4, 5]);
        let other = scores(&model, [1, 2, 3, 6, 5]);
        assert_eq!(one[..21], other[..21]);
        // The changed place itself, and the one after it, which has the same token in both.
        assert_ne!(one[21..28], other[21..28]);
        assert_ne!(one[28..], other[28..]);
    }

    #[test]
    fn parameters_are_counted() {
        // Embeddings of 7 and 5; in each block 3 + 1 + 4 + 4 squares and two norms; a norm.
        let expected = (7 + 5) * 8 + 2 * (12 * 64 + 4 * 8) + 2 * 8;
        assert_eq!(small().num_params(), expected);
    }

    #[test]
    fn the_likeliest_token_is_drawn_at_temperature_zero() {
        let device = Device::flex();
        let scores = Tensor::<1>::from_floats([0.0, 2.0, 1.0], &device);
        let next: i32 = draw(scores, 0.0).into_scalar();
        assert_eq!(next, 1);
    }

    /// Scores log 1 and log 3 at temperature 1: one in four; at temperature 1/2 they are log 1 and log 9: one in ten.
    #[test]
    fn draws_have_the_probabilities_of_the_softmax() {
        let device = Device::flex();
        device.seed(3);
        for (temperature, expected) in [(1.0, 0.25), (0.5, 0.1)] {
            let draws = 4000;
            let first = (0..draws).filter(|_| {
                let scores = Tensor::<1>::from_floats([0.0, 3.0_f32.ln()], &device);
                draw(scores, temperature).into_scalar::<i32>() == 0
            });
            let share = first.count() as f64 / f64::from(draws);
            // Five standard deviations of the mean of so many draws; other tests may draw from the same generator meanwhile.
            let margin = 5.0 * (expected * (1.0 - expected) / f64::from(draws)).sqrt();
            assert!((share - expected).abs() < margin, "{temperature}: {share}");
        }
    }

    #[test]
    fn a_sample_goes_on_beyond_the_context() {
        let model = small();
        let sample = model.sample(&[1, 2, 3], 9, 1.0);
        assert_eq!(sample.len(), 9);
        assert!(sample.iter().all(|token| (0..7).contains(token)));
        assert_eq!(model.sample(&[1], 3, 0.0), model.sample(&[1], 3, 0.0));
    }
}
