//! The code of the page on Burn's learner, beside the example.

use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::ExecutionError;
use burn::train::{
    InferenceStep, ItemLazy, Learner, LearningResult, SupervisedTraining, TrainOutput, TrainStep,
    metric::{Adaptor, LossInput, LossMetric},
};
use burn_ddp::train::learner::{GatherOutput, Pack, Unpack, UnpackError};
use burn_ddp::{Ddp, data::Tail};
use burn_ddp_tests::{oracle::floats, ranks};
use std::{error::Error, fs, path::Path, sync::Arc};

// ANCHOR: output
struct Scores {
    loss: Tensor<1>,   // the mean of the batch
    scores: Tensor<2>, // [batch, classes]
}

impl GatherOutput for Scores {
    fn pack(self, parts: &mut Pack) {
        parts.samples(self.scores); // a sample in each row
        parts.loss(self.loss);
    }

    fn unpack(parts: &mut Unpack) -> Result<Self, UnpackError> {
        let scores = parts.tensor()?; // in the order of `pack`
        let loss = parts.tensor()?;
        Ok(Self { loss, scores })
    }
}
// ANCHOR_END: output

impl ItemLazy for Scores {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(Self {
            loss: self.loss.without_autodiff(),
            scores: self.scores.without_autodiff(),
        })
    }
}

impl Adaptor<LossInput> for Scores {
    fn adapt(&self) -> LossInput {
        // The metric sees the samples of all ranks.
        assert_eq!(self.scores.dims(), [3, 1]);
        LossInput::new(self.loss.clone())
    }
}

#[derive(Module, Debug)]
struct Model {
    w: Param<Tensor<1>>,
}

impl Model {
    fn scores(&self, batch: Tensor<1>) -> Scores {
        let scores = batch * self.w.val();
        let loss = scores.clone().mean();
        let scores = scores.unsqueeze_dim(1);
        Scores { loss, scores }
    }
}

impl TrainStep for Model {
    type Input = Tensor<1>;
    type Output = Scores;

    fn step(&self, batch: Tensor<1>) -> TrainOutput<Scores> {
        let scores = self.scores(batch);
        TrainOutput::new(self, scores.loss.backward(), scores)
    }
}

impl InferenceStep for Model {
    type Input = Tensor<1>;
    type Output = Scores;

    fn step(&self, batch: Tensor<1>) -> Scores {
        self.scores(batch)
    }
}

struct Numbers;

impl Batcher<f32, Tensor<1>> for Numbers {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
        Tensor::from_data(&items[..], device)
    }
}

fn save(ddp: &Ddp, result: LearningResult<Model>, path: &Path) -> Result<(), Box<dyn Error>> {
    // ANCHOR: save
    if let Some(error) = result.error {
        return Err(error.into());
    }
    ddp.save_on_main(|| result.model.save_file(path))?;
    // ANCHOR_END: save
    Ok(())
}

/// Two items on rank 0 and one on rank 1, of a mean of 3.
#[test]
fn an_output_of_ones_own() {
    ranks(2).run("learner::an_output_of_ones_own", |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let loader = || {
            let items = InMemDataset::new(vec![1.0, 2.0, 6.0]);
            let loader = ddp.loader(items, Numbers).batch_size(2);
            Arc::new(loader.tail(Tail::Exact).build().unwrap())
        };
        let device = Device::flex().autodiff();
        let w = Param::from_tensor(Tensor::ones([1], &device));
        let result = SupervisedTraining::<Model>::new(directory.path(), loader(), loader())
            .metrics((LossMetric::new(),))
            .with_training_strategy(ddp.strategy())
            .launch(Learner::new(Model { w }, SgdConfig::new().init(), 0.0));
        let path = directory.path().join("model.bpk");
        assert_eq!(floats(result.model.w.val()), [1.0]);
        save(&ddp, result, &path).unwrap();
        assert_eq!(path.exists(), ddp.is_main());
        if ddp.is_main() {
            let log = directory.path().join("valid/epoch-1/Loss.log");
            assert_eq!(fs::read_to_string(log).unwrap(), "3,1\n3,final\n");
        }
    });
}
