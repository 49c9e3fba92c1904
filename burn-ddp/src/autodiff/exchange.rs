//! What the synchronised layers of one wrapped model tell their likes on the other ranks.
//!
//! All messages have one size, and each says what it is of. So ranks that are not in the same layer are told apart from each other, and a
//! rank without data can [answer](Exchange::answer) without knowing what the others are about to do.

use super::sessions::SyncSwitch;
use crate::{
    error::BackwardPanic,
    group::{DType, ProcessGroup},
    reducer::ReducerError,
};
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc};

type Result<T, E = ReducerError> = std::result::Result<T, E>;

/// A synchronised layer of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    pub(super) path: String,
    pub(super) channels: usize,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` with {} channels", self.path, self.channels)
    }
}

/// The statistics of a batch: of each channel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Statistics {
    /// Numbers that they are of.
    pub(crate) count: f64,
    pub(crate) mean: Vec<f64>,
    /// Biased.
    pub(crate) variance: Vec<f64>,
}

impl Statistics {
    /// Of no numbers at all.
    pub(crate) fn empty(channels: usize) -> Self {
        Self {
            count: 0.0,
            mean: vec![0.0; channels],
            variance: vec![0.0; channels],
        }
    }

    /// Of both batches together: T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    /// Variances", 1979, equations 2.1.
    fn with(mut self, other: &[f64], count: f64) -> Self {
        if count == 0.0 {
            return self;
        }
        let total = self.count + count;
        let share = count / total;
        let (means, variances) = other.split_at(self.mean.len());
        let own = self.mean.iter_mut().zip(&mut self.variance);
        for ((mean, variance), (m, v)) in own.zip(means.iter().zip(variances)) {
            let apart = m - *mean;
            *mean += apart * share;
            *variance += (v - *variance) * share + apart * apart * share * (1.0 - share);
        }
        self.count = total;
        self
    }
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It has run out of data.
    Joined,
    Forward(usize),
    Backward(usize),
}

impl Place {
    fn code(self) -> f64 {
        match self {
            Place::Joined => 0.0,
            Place::Forward(layer) => 1.0 + 2.0 * layer as f64,
            Place::Backward(layer) => 2.0 + 2.0 * layer as f64,
        }
    }

    fn read(code: f64) -> Self {
        match code as usize {
            0 => Place::Joined,
            code if code % 2 == 1 => Place::Forward(code / 2),
            code => Place::Backward(code / 2 - 1),
        }
    }
}

/// A number for the place, one for what the values count for, then two values a channel.
const HEADER: usize = 2;

/// The meeting place of the synchronised layers of one model, an ordering domain of its own: on the thread that runs forward and backward, in
/// the order of the graph.
#[derive(Debug)]
pub(crate) struct Exchange {
    group: Arc<dyn ProcessGroup>,
    layers: Vec<Layer>,
    switch: Arc<SyncSwitch>,
    /// The mean over ranks is one over samples.
    weighted: bool,
}

impl Exchange {
    pub(super) fn new(
        group: Arc<dyn ProcessGroup>,
        layers: Vec<Layer>,
        switch: Arc<SyncSwitch>,
        weighted: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            group,
            layers,
            switch,
            weighted,
        })
    }

    /// The statistics of all ranks' batches together. Collective.
    pub(crate) fn statistics(&self, layer: usize, own: &Statistics) -> Result<Statistics> {
        let values = [&own.mean[..], &own.variance].concat();
        let rows = self.meet(Place::Forward(layer), own.count, &values)?;
        let none = Statistics::empty(own.mean.len());
        Ok(rows
            .iter()
            .fold(none, |all, row| all.with(&row.values, row.scale)))
    }

    /// The sums over ranks of `own`, which come from gradients: each weighted as the gradients will be, in units of this rank's weight. Collective.
    pub(super) fn sums(&self, layer: usize, own: &[f64]) -> Result<Vec<f64>> {
        let samples = self.switch.samples().filter(|_| self.weighted);
        let weight = samples.map_or(1.0, |samples| samples as f64);
        let rows = self.meet(Place::Backward(layer), weight, own)?;
        let mut sums = vec![0.0; own.len()];
        // The loss over no sample is no number.
        for row in rows.iter().filter(|row| row.scale != 0.0) {
            for (sum, x) in sums.iter_mut().zip(&row.values) {
                *sum += x * (row.scale / weight.max(1.0));
            }
        }
        Ok(sums)
    }

    /// Takes part in the exchanges of the ranks that have data until all have come here. Collective.
    pub(super) fn answer(&self) -> Result<()> {
        while self
            .meet(Place::Joined, 0.0, &[])?
            .iter()
            .any(|row| row.place != Place::Joined)
        {}
        Ok(())
    }

    /// Every rank's values, after making sure that those that have some are in the same place.
    fn meet(&self, place: Place, scale: f64, values: &[f64]) -> Result<Vec<Row>> {
        let longest = self.layers.iter().map(|layer| 2 * layer.channels).max();
        let width = HEADER + longest.unwrap_or(0);
        let mut own = vec![place.code(), scale];
        own.extend_from_slice(values);
        own.resize(width, 0.0);
        let mut all = vec![0.0; width * self.group.world_size()];
        let (own, received) = (
            bytemuck::cast_slice(&own),
            bytemuck::cast_slice_mut(&mut all),
        );
        self.group.all_gather(own, received, DType::F64)?;
        let row = |row: &[f64]| Row {
            place: Place::read(row[0]),
            scale: row[1],
            values: row[HEADER..].to_vec(),
        };
        let rows: Vec<Row> = all.chunks_exact(width).map(row).collect();
        let places = rows.iter().map(|row| row.place).enumerate();
        let active: Vec<_> = places
            .filter(|(_, place)| *place != Place::Joined)
            .collect();
        let Some((first, reference)) = active.first().copied() else {
            return Ok(rows);
        };
        match active.iter().find(|(_, place)| *place != reference) {
            None => Ok(rows),
            Some((other, place)) => Err(ReducerError::LayersDiffer {
                rank: self.group.rank(),
                first,
                first_in: self.describe(reference),
                other: *other,
                other_in: self.describe(*place),
            }),
        }
    }

    fn describe(&self, place: Place) -> String {
        let (direction, layer) = match place {
            Place::Joined => return "`join`".into(),
            Place::Forward(layer) => ("forward", layer),
            Place::Backward(layer) => ("backward", layer),
        };
        match self.layers.get(layer) {
            Some(Layer { path, .. }) => format!("{direction} of `{path}`"),
            None => format!("{direction} of an unknown layer"),
        }
    }

    /// An error that is about one layer on this rank.
    pub(crate) fn cannot(&self, layer: usize, cause: impl ToString) -> ReducerError {
        let path = self.layers.get(layer).map(|layer| layer.path.clone());
        ReducerError::Layer {
            rank: self.group.rank(),
            path: path.unwrap_or_default(),
            cause: cause.to_string(),
        }
    }

    /// Tells the peers that this rank will not come any more.
    pub(crate) fn abort(&self, reason: &dyn fmt::Display) {
        self.group.abort(&reason.to_string());
    }

    /// Leaves a backward pass with `error`.
    pub(super) fn fail(&self, error: ReducerError) -> ! {
        self.abort(&error);
        BackwardPanic::raise(error)
    }
}

/// What one rank has said.
#[derive(Debug)]
struct Row {
    place: Place,
    scale: f64,
    values: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_give_the_statistics_of_the_whole() {
        // 1 2 | 6 | nothing | 3 4 8: mean 4, squares of deviations 9 4 4 1 0 16.
        let parts: [(&[f64], f64); 4] = [
            (&[1.5, 0.25], 2.0),
            (&[6.0, 0.0], 1.0),
            (&[f64::NAN, f64::NAN], 0.0),
            (&[5.0, 14.0 / 3.0], 3.0),
        ];
        let fold = |all: Statistics, (values, count): &(&[f64], f64)| all.with(values, *count);
        let all = parts.iter().fold(Statistics::empty(1), fold);
        assert_eq!(all.count, 6.0);
        assert!((all.mean[0] - 4.0).abs() < 1e-14, "{all:?}");
        assert!((all.variance[0] - 34.0 / 6.0).abs() < 1e-14, "{all:?}");
    }

    #[test]
    fn places_are_read_as_written() {
        let places = [
            Place::Joined,
            Place::Forward(0),
            Place::Backward(0),
            Place::Forward(7),
            Place::Backward(1 << 40),
        ];
        assert_eq!(places.map(|place| Place::read(place.code())), places);
    }
}
