//! The user's own values over ranks.

use super::Ddp;
use crate::{
    encoding,
    error::Error,
    group::{DType, ReduceOp, objects},
};
use serde::{Serialize, de::DeserializeOwned};
use std::fmt::Display;

impl Ddp {
    /// Reduces `values` over ranks, in f64. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn all_reduce(&self, values: &mut [f64], op: ReduceOp) -> Result<(), Error> {
        Ok(self
            .inner
            .group
            .all_reduce(bytemuck::cast_slice_mut(values), DType::F64, op)?)
    }

    /// The sum of `value` over ranks. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn sum(&self, value: f64) -> Result<f64, Error> {
        let mut values = [value];
        self.all_reduce(&mut values, ReduceOp::Sum)?;
        Ok(values[0])
    }

    /// The mean of `value` over ranks, each counting once. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn mean(&self, value: f64) -> Result<f64, Error> {
        let mut values = [value];
        self.all_reduce(&mut values, ReduceOp::Mean)?;
        Ok(values[0])
    }

    /// Whether `flag` is set on any rank. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn any(&self, flag: bool) -> Result<bool, Error> {
        Ok(self.sum(f64::from(u8::from(flag)))? > 0.0)
    }

    /// Whether `flag` is set on all ranks. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn all(&self, flag: bool) -> Result<bool, Error> {
        Ok(!self.any(!flag)?)
    }

    /// Rank 0's value on every rank. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`Error::Encoding`] when the value cannot be serialised.
    pub fn broadcast<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<T, Error> {
        let group = &*self.inner.group;
        let mut bytes = if self.is_main() {
            encoding::encode(group, "broadcast", &value)?
        } else {
            Vec::new()
        };
        objects::broadcast(group, &mut bytes, 0)?;
        encoding::decode(group, "broadcast", &bytes)
    }

    /// Every rank's value, in rank order. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`Error::Encoding`] when the value cannot be serialised.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, Error> {
        encoding::all_gather(&*self.inner.group, "all_gather", value)
    }

    /// Returns when every rank has called it. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`].
    pub fn barrier(&self) -> Result<(), Error> {
        Ok(self.inner.group.barrier()?)
    }

    /// [`barrier`](Self::barrier) without the operation time-out: waits as long as the other ranks' processes live. For phases in which
    /// some ranks work and the others have nothing to do, such as an evaluation on rank 0 alone. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] when a rank dies or leaves.
    pub fn monitored_barrier(&self) -> Result<(), Error> {
        Ok(self.inner.group.monitored_barrier()?)
    }

    /// Runs `save` on rank 0 while the others wait for it, however long it takes; its error reaches every rank. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::OnMain`] with the text of rank 0's error; [`Error::Group`].
    pub fn save_on_main<E: Display>(
        &self,
        save: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), Error> {
        let outcome = if self.is_main() {
            save().map_err(|e| e.to_string())
        } else {
            Ok(())
        };
        self.monitored_barrier()?;
        self.broadcast(outcome)?.map_err(|cause| Error::OnMain {
            rank: self.rank(),
            operation: "save".into(),
            cause,
        })
    }
}
