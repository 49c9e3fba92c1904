//! The parameters of a wrapped model, as the ranks must agree on them.

use crate::group::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// One distinct float parameter. Tied parameters (one [`ParamId`](burn::module::ParamId) in
/// several fields) are one entry, under the path that comes first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ParamSpec {
    /// Module path, such as `layers.0.weight`.
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    /// Whether it requires gradients at `wrap`. Frozen ones may be unfrozen later.
    pub(crate) trainable: bool,
}

impl ParamSpec {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

impl fmt::Display for ParamSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {:?} {}", self.path, self.shape, self.dtype)?;
        f.write_str(if self.trainable { "" } else { " frozen" })
    }
}

/// The distinct float parameters in registration order. Index into it: a *slot*.
///
/// Keys are module paths: a `ParamId` is random per process and a hash map has no order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) params: Vec<ParamSpec>,
}

impl Layout {
    pub(crate) fn len(&self) -> usize {
        self.params.len()
    }

    /// The first place where two layouts differ, as (ours, theirs).
    pub(crate) fn first_difference(&self, other: &Self) -> Option<(String, String)> {
        let absent = || "nothing (the model ends here)".to_string();
        let show = |p: Option<&ParamSpec>| p.map_or_else(absent, ToString::to_string);
        (0..self.len().max(other.len())).find_map(|i| {
            let (a, b) = (self.params.get(i), other.params.get(i));
            (a != b).then(|| (show(a), show(b)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(params: &[(&str, &[usize])]) -> Layout {
        let spec = |(path, shape): &(&str, &[usize])| ParamSpec {
            path: path.to_string(),
            shape: shape.to_vec(),
            dtype: DType::F32,
            trainable: true,
        };
        Layout {
            params: params.iter().map(spec).collect(),
        }
    }

    #[test]
    fn equal_layouts_have_no_difference() {
        let a = layout(&[("w", &[2, 3]), ("b", &[3])]);
        assert_eq!(a.first_difference(&a.clone()), None);
    }

    #[test]
    fn the_first_difference_shows_both_sides() {
        let a = layout(&[("w", &[2, 3]), ("b", &[3])]);
        let b = layout(&[("w", &[2, 4]), ("b", &[4])]);
        let (ours, theirs) = a.first_difference(&b).unwrap_or_default();
        assert_eq!(ours, "`w` [2, 3] f32");
        assert_eq!(theirs, "`w` [2, 4] f32");
    }

    #[test]
    fn a_missing_layer_is_a_difference() {
        let a = layout(&[("w", &[2])]);
        let b = layout(&[("w", &[2]), ("head.w", &[5])]);
        let (ours, theirs) = a.first_difference(&b).unwrap_or_default();
        assert_eq!(ours, "nothing (the model ends here)");
        assert_eq!(theirs, "`head.w` [5] f32");
    }
}
