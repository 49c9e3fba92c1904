//! Text as tokens: one character each, and windows of them to learn the next character from.
//!
//! The text is part of the program, so that it trains without a download. Origin and licence:
//! `examples/data/README.md`.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::ops::Range;
use std::sync::Arc;

/// Shakespeare's Coriolanus.
static CORIOLANUS: &str = include_str!("../../data/coriolanus.txt");

/// The last tenth of the text is for measuring. By position and not by chance: a part between two others is half known already.
const TRAIN_TENTHS: usize = 9;

/// The characters of a text, in the order of their code points.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary(Vec<char>);

impl Vocabulary {
    /// Each character that is in `text`, once.
    pub fn of(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        Self(characters)
    }

    /// Number of characters: tokens are smaller than this.
    pub fn size(&self) -> usize {
        self.0.len()
    }

    /// The tokens of `text`.
    ///
    /// # Errors
    ///
    /// The first character that has no token.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>, char> {
        let token = |c: char| self.0.binary_search(&c).map(|at| at as i32).map_err(|_| c);
        text.chars().map(token).collect()
    }

    /// The text of `tokens`; what is no token is left out.
    pub fn decode(&self, tokens: &[i32]) -> String {
        let character = |&token: &i32| self.0.get(usize::try_from(token).ok()?).copied();
        tokens.iter().filter_map(character).collect()
    }
}

/// A text, cut into a part to learn from and a part to measure with.
#[derive(Debug, Clone)]
pub struct Text {
    /// What it is called on the screen.
    pub name: &'static str,
    /// Its characters.
    pub vocabulary: Vocabulary,
    tokens: Arc<[i32]>,
}

impl Text {
    /// The text that is part of the program.
    pub fn coriolanus() -> Self {
        Self::new("Coriolanus", CORIOLANUS)
    }

    fn new(name: &'static str, text: &str) -> Self {
        let vocabulary = Vocabulary::of(text);
        // The vocabulary is the text's own, so there is a token for each character.
        let tokens = vocabulary.encode(text).unwrap_or_default().into();
        Self {
            name,
            vocabulary,
            tokens,
        }
    }

    /// Number of characters.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    fn split(&self) -> usize {
        self.len() * TRAIN_TENTHS / 10
    }

    /// Tokens to learn from.
    pub fn train_tokens(&self) -> &[i32] {
        &self.tokens[..self.split()]
    }

    /// Tokens to measure with.
    pub fn validation_tokens(&self) -> &[i32] {
        &self.tokens[self.split()..]
    }

    /// Windows of `context` tokens to learn from: one begins at each character.
    pub fn train(&self, context: usize) -> Windows {
        self.windows(0..self.split(), context, 1)
    }

    /// Windows of `context` tokens to measure with, side by side: each token is predicted once, but for a rest that fills no window.
    pub fn validation(&self, context: usize) -> Windows {
        self.windows(self.split()..self.len(), context, context)
    }

    fn windows(&self, part: Range<usize>, context: usize, stride: usize) -> Windows {
        Windows {
            tokens: self.tokens.clone(),
            part,
            context,
            stride: stride.max(1),
        }
    }
}

/// Pieces of a text, all of the same length.
#[derive(Debug, Clone)]
pub struct Windows {
    tokens: Arc<[i32]>,
    part: Range<usize>,
    context: usize,
    stride: usize,
}

/// One token more than the context: all but the last are seen, all but the first are predicted.
pub type Window = Vec<i32>;

impl Dataset<Window> for Windows {
    fn get(&self, index: usize) -> Result<Window, DatasetError> {
        let start = self.part.start + index * self.stride;
        Ok(self.tokens[start..=start + self.context].to_vec())
    }

    fn len(&self) -> usize {
        match self.part.len().checked_sub(self.context + 1) {
            Some(room) => room / self.stride + 1,
            None => 0,
        }
    }
}

/// Windows as tensors.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// `[batch, context]`: what the model sees.
    pub tokens: Tensor<2, Int>,
    /// `[batch, context]`: what comes after each of them.
    pub next: Tensor<2, Int>,
}

/// Makes a [`TokenBatch`] of [`Window`]s.
#[derive(Debug, Clone, Copy)]
pub struct WindowBatcher;

impl Batcher<Window, TokenBatch> for WindowBatcher {
    fn batch(&self, windows: Vec<Window>, device: &Device) -> TokenBatch {
        let context = windows.first().map_or(0, |window| window.len() - 1);
        let shape = [windows.len(), context];
        let tensor = |part: fn(&Window) -> &[i32]| {
            let values: Vec<i32> = windows.iter().flat_map(part).copied().collect();
            Tensor::from_data(TensorData::new(values, shape), device)
        };
        TokenBatch {
            tokens: tensor(|window| &window[..window.len() - 1]),
            next: tensor(|window| &window[1..]),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_is_sorted_and_reads_back() {
        let vocabulary = Vocabulary::of("abba, c");
        assert_eq!(vocabulary.size(), 5);
        let tokens = vocabulary.encode("c, ab").unwrap();
        assert_eq!(tokens, [4, 1, 0, 2, 3]);
        assert_eq!(vocabulary.decode(&tokens), "c, ab");
        assert_eq!(vocabulary.encode("bad"), Err('d'));
    }

    #[test]
    fn the_text_is_as_its_page_says() {
        let text = Text::coriolanus();
        assert_eq!(text.len(), 154_469);
        assert_eq!(text.train_tokens().len(), 139_022);
        assert_eq!(text.validation_tokens().len(), 15_447);
        assert_eq!(text.vocabulary.size(), 61);
        let start = text.vocabulary.decode(&text.train_tokens()[..14]);
        assert_eq!(start, "First Citizen:");
        let end = text.validation_tokens();
        let end = text.vocabulary.decode(&end[end.len() - 8..]);
        assert_eq!(end, "Assist.\n");
    }

    /// Twenty letters: 18 to learn from, 2 to measure with.
    #[test]
    fn windows_cover_their_part_and_nothing_else() {
        let text = Text::new("letters", "abcdefghijklmnopqrst");
        let train = text.train(4);
        assert_eq!(train.len(), 14);
        assert_eq!(train.get(0).unwrap(), [0, 1, 2, 3, 4]);
        assert_eq!(train.get(13).unwrap(), [13, 14, 15, 16, 17]);
        let validation = text.validation(1);
        assert_eq!(validation.len(), 1);
        assert_eq!(validation.get(0).unwrap(), [18, 19]);
        assert_eq!(text.validation(2).len(), 0);

        // 4 tokens, of which the first is never predicted and the last fills no window.
        let long = Text::new("long", "abcdefghijklmnopqrstabcdefghijklmnopqrst");
        let side_by_side = long.validation(2);
        assert_eq!(side_by_side.len(), 1);
        assert_eq!(side_by_side.get(0).unwrap(), [16, 17, 18]);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_batch_holds_each_window_and_what_comes_after() {
        let windows = vec![vec![0, 1, 2], vec![5, 6, 7]];
        let batch = WindowBatcher.batch(windows, &Device::flex());
        let values = |tensor: Tensor<2, Int>| -> Vec<i32> {
            assert_eq!(tensor.dims(), [2, 2]);
            tensor.into_data().try_to_vec().unwrap()
        };
        assert_eq!(values(batch.tokens), [0, 1, 5, 6]);
        assert_eq!(values(batch.next), [1, 2, 6, 7]);
    }
}
