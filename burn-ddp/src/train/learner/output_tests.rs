#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use burn::train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

fn device() -> Device {
    Device::flex()
}

fn numbers<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> Vec<f64> {
    let data = tensor
        .into_data()
        .try_cast(burn::tensor::DType::F64)
        .unwrap();
    data.as_slice::<f64>().unwrap().to_vec()
}

/// As if each output were a rank's, with so many samples that count.
fn across<T: GatherOutput>(ranks: Vec<(T, Option<usize>)>) -> Vec<T> {
    let packs = ranks.into_iter().map(|(output, valid)| {
        let bytes = postcard::to_stdvec(&Pack::of(Ok(output), valid)).unwrap();
        postcard::from_bytes(&bytes).unwrap()
    });
    let merged = Pack::merge(packs.collect()).unwrap();
    merged
        .into_iter()
        .map(|pack| pack.open(&device()).unwrap())
        .collect()
}

fn regression(loss: &[f32], output: &[[f32; 2]]) -> RegressionOutput {
    let [loss, target] = [loss, &vec![7.0; output.len()]].map(|v| Tensor::from_data(v, &device()));
    let rows = output
        .iter()
        .copied()
        .map(|row| Tensor::from_data([row], &device()));
    RegressionOutput::new(
        loss,
        Tensor::cat(rows.collect(), 0),
        target.unsqueeze_dim(1),
    )
}

/// Means of 1 over three samples and of 5 over one, without the repeated second.
#[test]
fn ddp_19_samples_come_together_and_mean_losses_are_weighted() {
    let ranks = vec![
        (
            regression(&[1.0], &[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
            None,
        ),
        (regression(&[5.0], &[[7.0, 8.0], [1.0, 2.0]]), Some(1)),
        (regression(&[9.0], &[[0.0, 0.0]]), Some(0)),
    ];
    let merged = across(ranks);
    let [merged] = &merged[..] else { panic!() };
    let expected = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    assert_eq!(numbers(merged.output.clone()), expected);
    assert_eq!(merged.output.dims(), [4, 2]);
    assert_eq!(merged.targets.dims(), [4, 1]);
    assert_eq!(numbers(merged.loss.clone()), [2.0]);
}

#[test]
fn ddp_19_losses_of_single_samples_lose_the_padding_too() {
    let ranks = vec![
        (regression(&[1.0, 2.0], &[[0.0; 2]; 2]), Some(2)),
        (regression(&[3.0, 4.0], &[[0.0; 2]; 2]), Some(1)),
    ];
    assert_eq!(numbers(across(ranks)[0].loss.clone()), [1.0, 2.0, 3.0]);
}

#[test]
fn outputs_of_burn_keep_their_fields() {
    let loss = || Tensor::<1>::from_data([0.5], &device());
    let scores = Tensor::<2>::from_data([[1.0, 2.0], [3.0, 4.0]], &device());
    let classes = Tensor::<1, Int>::from_data([0, 1], &device());
    let merged = across(vec![(
        ClassificationOutput::new(loss(), scores.clone(), classes),
        None,
    )]);
    assert_eq!(numbers(merged[0].output.clone()), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(numbers(merged[0].targets.clone()), [0.0, 1.0]);
    assert_eq!(numbers(merged[0].loss.clone()), [0.5]);

    let labels = Tensor::<2, Int>::from_data([[0, 1], [1, 1]], &device());
    let merged = across(vec![(
        MultiLabelClassificationOutput::new(loss(), scores, labels.clone()),
        None,
    )]);
    assert_eq!(numbers(merged[0].targets.clone()), [0.0, 1.0, 1.0, 1.0]);

    for predictions in [None, Some(labels.clone())] {
        let logits = Tensor::<3>::ones([2, 2, 3], &device());
        let output = SequenceOutput::new(loss(), logits, predictions.clone(), labels.clone());
        let merged = across(vec![(output, Some(1))]);
        assert_eq!(merged[0].logits.dims(), [1, 2, 3]);
        assert_eq!(numbers(merged[0].targets.clone()), [0.0, 1.0]);
        let found = merged[0].predictions.clone().map(numbers);
        assert_eq!(found, predictions.map(|_| vec![0.0, 1.0]));
    }
}

/// Sequences of two tokens on one rank and of three on the other.
#[test]
fn outputs_of_other_shapes_stay_apart() {
    let sequence = |tokens| {
        let logits = Tensor::<3>::ones([1, tokens, 3], &device());
        let targets = Tensor::<2, Int>::zeros([1, tokens], &device());
        let loss = Tensor::<1>::from_data([1.0], &device());
        (SequenceOutput::new(loss, logits, None, targets), None)
    };
    let merged = across(vec![sequence(2), sequence(3)]);
    let tokens: Vec<usize> = merged
        .iter()
        .map(|output| output.logits.dims()[1])
        .collect();
    assert_eq!(tokens, [2, 3]);
}

struct Wrong<const MORE: bool>;

impl<const MORE: bool> ItemLazy for Wrong<MORE> {
    fn sync(self) -> Result<Self, burn::tensor::ExecutionError> {
        Ok(self)
    }
}

impl<const MORE: bool> GatherOutput for Wrong<MORE> {
    fn pack(self, parts: &mut Pack) {
        parts.samples(Tensor::<2>::ones([1, 1], &device()));
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        if MORE {
            parts.tensor::<2, burn::tensor::Float>()?;
        }
        parts.tensor::<1, burn::tensor::Float>()?;
        Ok(Self)
    }
}

#[test]
fn pack_and_unpack_that_do_not_fit() {
    let error = |pack: Pack, more| match more {
        true => pack.open::<Wrong<true>>(&device()).err(),
        false => pack.open::<Wrong<false>>(&device()).err(),
    };
    let missing = error(Pack::of(Ok(Wrong::<true>), None), true);
    assert_eq!(missing, Some(UnpackError::Missing));
    let shape = error(Pack::of(Ok(Wrong::<false>), None), false);
    let (found, expected) = (2, 1);
    assert_eq!(shape, Some(UnpackError::Shape { found, expected }));
    let cause = "the device is gone".to_owned();
    let failed = Pack::of(Err::<Wrong<true>, _>(cause.clone()), None);
    let error = Pack::merge(vec![failed]).err();
    assert_eq!(error, Some(UnpackError::Read { cause }));
}
