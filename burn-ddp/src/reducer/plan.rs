//! Which parameter goes into which bucket, and where.

use super::layout::Layout;
use crate::group::DType;
use std::ops::Range;

/// Limits on the gradient bytes of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketCaps {
    /// The bucket that is launched first. Small, so that communication starts early.
    pub(crate) first: usize,
    /// Every other bucket.
    pub(crate) rest: usize,
}

/// Elements of a tail beside those of the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TailSizes {
    /// In every bucket.
    pub(crate) each: usize,
    /// At the end of the first.
    pub(crate) first: usize,
}

/// Where one parameter's gradient lies in its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) slot: usize,
    /// Byte offset in the bucket.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) bytes: usize,
}

impl Placement {
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.bytes
    }
}

/// One bucket: gradients of one element type back to back, then the control tail.
///
/// The tail is one element per parameter (1 when this rank used it, else 0), then what [`TailSizes`] says. It is reduced
/// with the data, so that every rank learns what the others used without another round trip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BucketPlan {
    pub(crate) dtype: DType,
    pub(crate) placements: Vec<Placement>,
    /// Bytes of gradient data; the tail begins here.
    pub(crate) data_bytes: usize,
    /// Elements in the tail.
    pub(crate) tail_elements: usize,
}

impl BucketPlan {
    /// Bytes of data and tail together.
    pub(crate) fn bytes(&self) -> usize {
        self.data_bytes + self.tail_elements * self.dtype.size()
    }
}

/// Fills buckets with the parameters of `order` (slots, the one whose gradient is expected first in
/// front). Buckets come out in the order in which their last gradient is expected.
///
/// The greedy fill by size limit is the one of S. Li et al., "PyTorch Distributed: Experiences on
/// Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
pub(crate) fn assign(
    layout: &Layout,
    order: &[usize],
    caps: BucketCaps,
    tail: TailSizes,
) -> Vec<BucketPlan> {
    struct Open {
        plan: BucketPlan,
        last: usize,
    }
    let mut open: Vec<Open> = Vec::new();
    let mut done: Vec<Open> = Vec::new();
    for (position, &slot) in order.iter().enumerate() {
        let spec = &layout.params[slot];
        let index = match open.iter().position(|b| b.plan.dtype == spec.dtype) {
            Some(index) => index,
            None => {
                open.push(Open {
                    plan: BucketPlan {
                        dtype: spec.dtype,
                        placements: Vec::new(),
                        data_bytes: 0,
                        tail_elements: tail.each,
                    },
                    last: 0,
                });
                open.len() - 1
            }
        };
        let bucket = &mut open[index];
        bucket.plan.placements.push(Placement {
            slot,
            offset: bucket.plan.data_bytes,
            bytes: spec.bytes(),
        });
        bucket.plan.data_bytes += spec.bytes();
        bucket.plan.tail_elements += 1;
        bucket.last = position;
        let cap = if done.is_empty() {
            caps.first
        } else {
            caps.rest
        };
        if bucket.plan.data_bytes >= cap {
            done.push(open.swap_remove(index));
        }
    }
    done.append(&mut open);
    done.sort_by_key(|b| b.last);
    let mut plans: Vec<BucketPlan> = done.into_iter().map(|b| b.plan).collect();
    if let Some(first) = plans.first_mut() {
        first.tail_elements += tail.first;
    }
    plans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reducer::layout::ParamSpec;

    fn layout(params: &[(usize, DType)]) -> Layout {
        let spec = |(i, (n, dtype)): (usize, &(usize, DType))| ParamSpec {
            path: format!("p{i}"),
            shape: vec![*n],
            dtype: *dtype,
            trainable: true,
        };
        Layout {
            params: params.iter().enumerate().map(spec).collect(),
        }
    }

    fn slots(plan: &BucketPlan) -> Vec<usize> {
        plan.placements.iter().map(|p| p.slot).collect()
    }

    #[test]
    fn the_first_bucket_is_small_and_the_rest_fill_up() {
        let l = layout(&[(10, DType::F32); 6]);
        let caps = BucketCaps {
            first: 40,
            rest: 100,
        };
        let plans = assign(
            &l,
            &[5, 4, 3, 2, 1, 0],
            caps,
            TailSizes { each: 2, first: 3 },
        );
        assert_eq!(
            plans.iter().map(slots).collect::<Vec<_>>(),
            [vec![5], vec![4, 3, 2], vec![1, 0]]
        );
        assert_eq!(
            plans[1].placements[2],
            Placement {
                slot: 2,
                offset: 80,
                bytes: 40
            }
        );
        assert_eq!(
            plans[0].tail_elements, 6,
            "a used flag, and two and three elements more"
        );
        assert_eq!(plans[1].bytes(), 120 + (3 + 2) * 4);
    }

    #[test]
    fn element_types_do_not_mix_and_the_order_follows_the_last_gradient() {
        let l = layout(&[
            (4, DType::F32),
            (4, DType::F64),
            (4, DType::F32),
            (4, DType::F64),
        ]);
        let caps = BucketCaps {
            first: 1 << 20,
            rest: 1 << 20,
        };
        let plans = assign(&l, &[1, 0, 2, 3], caps, TailSizes::default());
        assert_eq!(
            plans.iter().map(slots).collect::<Vec<_>>(),
            [vec![0, 2], vec![1, 3]]
        );
        assert_eq!(plans[1].dtype, DType::F64);
    }

    #[test]
    fn a_parameter_larger_than_the_cap_has_a_bucket_of_its_own() {
        let l = layout(&[(1, DType::F32), (1000, DType::F32), (1, DType::F32)]);
        let caps = BucketCaps { first: 4, rest: 64 };
        let plans = assign(&l, &[0, 1, 2], caps, TailSizes::default());
        assert_eq!(
            plans.iter().map(slots).collect::<Vec<_>>(),
            [vec![0], vec![1], vec![2]]
        );
    }

    #[test]
    fn no_parameters_make_no_buckets() {
        let caps = BucketCaps { first: 1, rest: 1 };
        assert!(assign(&Layout::default(), &[], caps, TailSizes::default()).is_empty());
    }
}
