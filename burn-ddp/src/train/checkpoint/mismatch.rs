//! In which parameters a model and its saved record differ.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Int, Shape, Tensor};
use burn_pack::Reader;
use std::{collections::BTreeMap, fmt};

/// The shapes of a model's parameters and buffers, in module order.
#[derive(Default)]
pub(super) struct Shapes {
    path: Vec<String>,
    found: Vec<(String, Shape)>,
}

/// The first parameter in which a model and a record differ, and how many others do.
#[derive(Debug, PartialEq)]
pub(super) struct Mismatch {
    path: String,
    /// In the model.
    here: Option<Vec<usize>>,
    /// In the record.
    saved: Option<Vec<usize>>,
    others: usize,
}

impl Shapes {
    pub(super) fn of<M: Module>(model: &M) -> Self {
        let mut shapes = Self::default();
        model.visit(&mut shapes);
        shapes
    }

    /// The difference to a record in Burn's format; `None` when names and shapes are the same, or when it cannot be read.
    pub(super) fn mismatch(&self, record: Bytes) -> Option<Mismatch> {
        let tensors = Reader::from_bytes(record).ok()?.into_tensors().ok()?;
        let parts = tensors.into_iter().map(|tensor| {
            let (name, _, shape, ..) = tensor.into_parts().ok()?;
            Some((name, shape))
        });
        let mut saved: BTreeMap<String, Shape> = parts.collect::<Option<_>>()?;
        let of_model = self.found.iter().map(|(path, here)| {
            let saved = saved.remove(path);
            (path.clone(), Some(here.clone()), saved)
        });
        let of_model: Vec<_> = of_model.collect();
        let of_record = saved
            .into_iter()
            .map(|(path, shape)| (path, None, Some(shape)));
        let all = of_model.into_iter().chain(of_record);
        let mut different = all.filter(|(_, here, saved)| here != saved);
        let (path, here, saved) = different.next()?;
        Some(Mismatch {
            path,
            here: here.map(|shape| shape.to_vec()),
            saved: saved.map(|shape| shape.to_vec()),
            others: different.count(),
        })
    }

    fn add(&mut self, shape: Shape) {
        self.found.push((self.path.join("."), shape));
    }
}

/// As Burn itself finds the places of a record.
impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.add(param.lazy_shape());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(param.lazy_shape());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(param.lazy_shape());
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match (&self.here, &self.saved) {
            (Some(here), Some(saved)) => write!(
                f,
                "`{path}` is {here:?} in this model and {saved:?} in the checkpoint"
            )?,
            (Some(_), None) => write!(f, "this model has `{path}` and the checkpoint has not")?,
            _ => write!(f, "the checkpoint has `{path}` and this model has not")?,
        }
        if self.others > 0 {
            write!(f, ", and {} more parameters differ", self.others)?;
        }
        write!(
            f,
            ". Build the model with the settings it was saved with, or name another directory for this one"
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    fn layers(sizes: &[[usize; 2]], bias: bool) -> Vec<Linear> {
        let layer = |&[input, output]: &[usize; 2]| {
            let config = LinearConfig::new(input, output).with_bias(bias);
            config.init(&Device::flex())
        };
        sizes.iter().map(layer).collect()
    }

    fn mismatch(here: Vec<Linear>, saved: Vec<Linear>) -> Option<String> {
        let record = saved.into_record().into_bytes().unwrap();
        let mismatch = Shapes::of(&here).mismatch(record)?;
        Some(mismatch.to_string())
    }

    const CURE: &str = "Build the model with the settings it was saved with, or name another directory for this one";

    #[test]
    fn the_first_in_module_order_and_the_number_of_the_others() {
        let (small, large) = ([[2, 3], [3, 1]], [[2, 4], [4, 1]]);
        let text = mismatch(layers(&small, true), layers(&large, true)).unwrap();
        let first = "`0.weight` is [2, 3] in this model and [2, 4] in the checkpoint";
        // Two weights and the first bias; the second bias is one number in both.
        assert_eq!(
            text,
            format!("{first}, and 2 more parameters differ. {CURE}")
        );
        assert_eq!(mismatch(layers(&small, true), layers(&small, true)), None);
    }

    #[test]
    fn what_is_on_one_side_only() {
        let (one, two) = ([[2, 3]], [[2, 3], [3, 1]]);
        let text = mismatch(layers(&two, false), layers(&one, false)).unwrap();
        assert_eq!(
            text,
            format!("this model has `1.weight` and the checkpoint has not. {CURE}")
        );
        let text = mismatch(layers(&one, false), layers(&two, false)).unwrap();
        assert_eq!(
            text,
            format!("the checkpoint has `1.weight` and this model has not. {CURE}")
        );
    }

    #[test]
    fn nonsense_has_no_difference() {
        let shapes = Shapes::of(&layers(&[[2, 3]], false));
        let record = Bytes::from_bytes_vec(b"BURNnonsense".to_vec());
        assert_eq!(shapes.mismatch(record), None);
    }
}
