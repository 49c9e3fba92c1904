//! Optimizer state as Burn's records hold it, taken apart by parameter.
//!
//! `OptimizerRecord` shows nothing of its contents, but its bytes are a public format, burnpack: tensors and scalars named
//! `<parameter id>.<field>`, and the parameter's module path under its id.

use burn::optim::OptimizerRecord;
use burn::tensor::Bytes;
use burn_pack::{DType, Reader, Scalar, Writer};
use std::{collections::BTreeMap, fmt::Display, ops::Range};

/// The scalar that Burn adds to each parameter's state: its number of dimensions.
const DIMENSIONS: &str = "__rank";

/// Burn panics over the state of a parameter with more.
const MAX_DIMENSIONS: usize = 8;

/// Why a record could not be read or written.
pub(super) type Cause = String;

fn cause(error: impl Display) -> Cause {
    error.to_string()
}

/// The state of several parameters, by number: Burn's parameter ids, or the partition's numbers between ranks.
#[derive(Debug, Default)]
pub(super) struct States(pub(super) BTreeMap<u64, State>);

/// The state of one parameter, or of a part of it.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) path: Option<String>,
    scalars: BTreeMap<String, Scalar>,
    tensors: BTreeMap<String, Values>,
}

#[derive(Debug)]
struct Values {
    dtype: DType,
    dims: Vec<usize>,
    bytes: Bytes,
}

impl States {
    pub(super) fn from_record(record: OptimizerRecord) -> Result<Self, Cause> {
        Self::from_bytes(record.into_bytes().map_err(cause)?)
    }

    pub(super) fn into_record(self) -> Result<OptimizerRecord, Cause> {
        OptimizerRecord::from_bytes(self.into_bytes()?).map_err(cause)
    }

    pub(super) fn from_bytes(bytes: Bytes) -> Result<Self, Cause> {
        let reader = Reader::from_bytes(bytes).map_err(cause)?;
        let mut states = Self::default();
        for (number, path) in reader.metadata() {
            if let Ok(number) = number.parse() {
                states.0.entry(number).or_default().path = Some(path.clone());
            }
        }
        for (name, value) in reader.scalars() {
            let (state, field) = states.field(name)?;
            state.scalars.insert(field, *value);
        }
        let too_many = |value: &Scalar| usize::try_from(*value).is_ok_and(|n| n > MAX_DIMENSIONS);
        let mut dimensions = states.0.values().filter_map(|s| s.scalars.get(DIMENSIONS));
        if dimensions.any(too_many) {
            return Err("it has a parameter of more dimensions than Burn knows".into());
        }
        for tensor in reader.into_tensors().map_err(cause)? {
            let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(cause)?;
            let (state, field) = states.field(&name)?;
            let dims = shape.to_vec();
            state.tensors.insert(field, Values { dtype, dims, bytes });
        }
        Ok(states)
    }

    fn field(&mut self, name: &str) -> Result<(&mut State, String), Cause> {
        let parts = name.split_once('.');
        let parts = parts.and_then(|(number, field)| Some((number.parse().ok()?, field)));
        let (number, field) = parts.ok_or_else(|| {
            format!("`{name}` in it is no `<parameter id>.<field>`; is it an optimizer's?")
        })?;
        Ok((self.0.entry(number).or_default(), field.to_string()))
    }

    pub(super) fn into_bytes(self) -> Result<Bytes, Cause> {
        let (mut tensors, mut scalars, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        for (number, state) in self.0 {
            let name = |field: String| format!("{number}.{field}");
            for (field, Values { dtype, dims, bytes }) in state.tensors {
                let tensor = burn_pack::Tensor::new(name(field), dtype, dims, Some(number), bytes);
                tensors.push(tensor);
            }
            scalars.extend(state.scalars.into_iter().map(|(f, value)| (name(f), value)));
            paths.extend(state.path.map(|path| (number.to_string(), path)));
        }
        let mut writer = Writer::new(tensors);
        for (name, value) in scalars {
            writer = writer.with_scalar(&name, value);
        }
        for (number, path) in paths {
            writer = writer.with_metadata(&number, &path);
        }
        writer.into_bytes().map_err(cause)
    }

    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> usize {
        let tensors = self.0.values().flat_map(|state| state.tensors.values());
        tensors.map(|values| values.bytes.len()).sum()
    }
}

impl State {
    /// The state of `elements` of a parameter of shape `dims`, flat.
    pub(super) fn cut(mut self, dims: &[usize], elements: Range<usize>) -> Result<Self, Cause> {
        for (field, values) in &mut self.tensors {
            if values.dims != dims {
                return Err(not_elementwise(field, &values.dims, dims));
            }
            let size = values.dtype.size();
            let bytes = &values.bytes[elements.start * size..elements.end * size];
            values.bytes = Bytes::from_bytes_vec(bytes.to_vec());
            values.dims = vec![elements.len()];
        }
        self.scalars.insert(DIMENSIONS.into(), Scalar::from(1usize));
        Ok(self)
    }

    /// The state of a parameter of shape `dims` whose flat parts have the states `parts`, in order.
    pub(super) fn join(parts: Vec<(Range<usize>, Self)>, dims: &[usize]) -> Result<Self, Cause> {
        let mut whole = Self::default();
        let mut fields: BTreeMap<String, (DType, Vec<u8>)> = BTreeMap::new();
        for (elements, part) in parts {
            for (field, values) in part.tensors {
                if values.dims != [elements.len()] {
                    return Err(not_elementwise(&field, &values.dims, &[elements.len()]));
                }
                let (_, bytes) = fields.entry(field).or_insert((values.dtype, Vec::new()));
                bytes.extend_from_slice(&values.bytes);
            }
            whole.path = part.path;
            whole.scalars = part.scalars;
        }
        let elements: usize = dims.iter().product();
        for (field, (dtype, bytes)) in fields {
            if bytes.len() != elements * dtype.size() {
                return Err(format!("the ranks' parts of `{field}` do not make a whole"));
            }
            let (dims, bytes) = (dims.to_vec(), Bytes::from_bytes_vec(bytes));
            whole.tensors.insert(field, Values { dtype, dims, bytes });
        }
        whole
            .scalars
            .insert(DIMENSIONS.into(), Scalar::from(dims.len()));
        Ok(whole)
    }
}

fn not_elementwise(field: &str, found: &[usize], expected: &[usize]) -> Cause {
    format!(
        "`{field}` has the shape {found:?} where the parameter has {expected:?}: this optimizer is not element-wise, use it without \
         `split_parameters`"
    )
}
