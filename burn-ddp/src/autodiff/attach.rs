//! `wrap`: agree on the model, make the replicas equal, attach the hooks.

use super::{
    buffers,
    exchange::{Exchange, Layer},
    hook::ParamHook,
    ladder::Ladder,
    layers, ops,
    proxy::Proxy,
    session::{Occurrence, Parts, Session},
    sessions::{Sessions, SyncSwitch},
};
use crate::{
    config::{BufferPolicy, Reduction, WrapConfig},
    dtype, encoding,
    error::Error,
    group::{ProcessGroup, objects},
    reducer::{Layout, ParamSpec, Reducer},
    replica,
};
use burn::backend::DispatchDevice;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterizer};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    mem::{Discriminant, discriminant},
    sync::{Arc, Mutex, OnceLock, atomic::AtomicBool},
};

/// What `wrap` needs of the process.
pub(crate) struct WrapContext<'a> {
    /// The group that orders `wrap` calls.
    pub(crate) group: &'a Arc<dyn ProcessGroup>,
    pub(crate) switch: &'a Arc<SyncSwitch>,
    pub(crate) sessions: &'a Arc<Sessions>,
    pub(crate) config: WrapConfig,
}

/// Wraps `model`; collective. With it its hooks, to attach them again to a copy that has lost them.
pub(crate) fn wrap<M: Module + 'static>(
    model: M,
    context: &WrapContext<'_>,
) -> Result<(M, Hooks), Error> {
    let group = context.group;
    let rank = group.rank();
    let rule = context.config.rule();
    let shared = rule
        .hook
        .is_some_and(|hook| context.sessions.has_hook(&hook));
    let survey = match shared {
        // Two communication threads would meet in one hook, in another order on each rank.
        true => Err(Error::SharedCommHook { rank }),
        false => Survey::of(&model, rank),
    };
    let survey = agree(&**group, survey, &context.config)?;
    let model = replica::broadcast(model, &**group)?;

    let reducer = if group.world_size() > 1 {
        let config = &context.config;
        let domain = group.new_group()?;
        Some(Reducer::new(
            domain,
            survey.layout.clone(),
            config.caps,
            config.rule(),
        )?)
    } else {
        None
    };
    let exchange = match survey.layers.is_empty() || group.world_size() == 1 {
        true => None,
        false => Some(Exchange::new(
            group.new_group()?,
            survey.layers,
            context.switch.clone(),
            rule.reduction == Reduction::WeightedMean,
        )),
    };
    let session = Session::new(
        rank,
        Parts {
            layout: survey.layout,
            occurrences: survey.occurrences,
            several_devices: survey.several_devices,
            reducer,
            exchange,
        },
        &context.config,
        context.switch.clone(),
        context.sessions.clone(),
    );
    let mut attach = Attach {
        ladder: Ladder::new(session.rungs(), &survey.device),
        session: session.clone(),
        paths: Vec::new(),
        hooks: Hooks::default(),
    };
    let keeps_buffers = session.reducer.is_some() && context.config.buffers != BufferPolicy::Off;
    let plain = keeps_buffers.then(|| model.clone());
    let mut model = model.apply_reparameterization(&mut attach);
    if let Some(exchange) = &session.exchange {
        model = layers::bind(model, exchange.clone());
        attach.hooks.exchange = Some(exchange.clone());
    }
    model.visit(&mut MeetHooks);
    if let Some(buffers) = plain.and_then(|plain| buffers::of(plain, &model)) {
        let _ = session.buffers.set(Mutex::new(buffers));
    }
    let attached = match session.first_unseen() {
        Some(occurrence) => Err(Error::ForeignReparameterization {
            rank,
            path: attach.paths.swap_remove(occurrence),
        }),
        None => Ok((model, attach.hooks)),
    };
    together(&**group, attached)
}

/// A step of `wrap` that may fail on one rank fails on all, so that nobody waits for a rank that has returned. Collective.
fn together<T>(group: &dyn ProcessGroup, outcome: Result<T, Error>) -> Result<T, Error> {
    let text = outcome.as_ref().err().map(ToString::to_string);
    let all = objects::gather(group, text.unwrap_or_default().as_bytes())?;
    let value = outcome?;
    match all.iter().position(|text| !text.is_empty()) {
        None => Ok(value),
        Some(peer) => Err(Error::PeerCannotWrap {
            rank: group.rank(),
            peer,
            cause: String::from_utf8_lossy(&all[peer]).into_owned(),
        }),
    }
}

/// The float parameters of a model in registration order.
struct Survey {
    layout: Layout,
    occurrences: Vec<Occurrence>,
    device: Device,
    several_devices: bool,
    /// Synchronised ones.
    layers: Vec<Layer>,
}

impl Survey {
    fn of<M: Module>(model: &M, rank: usize) -> Result<Self, Error> {
        let mut surveyor = Surveyor {
            rank,
            path: Vec::new(),
            layout: Layout::default(),
            occurrences: Vec::new(),
            slots: HashMap::new(),
            fields: Vec::new(),
            device: None,
            several_devices: false,
            layers: Vec::new(),
            error: None,
        };
        layers::find(model, &mut surveyor);
        match (surveyor.error, surveyor.device) {
            (Some(error), _) => Err(error),
            (None, None) => Err(Error::NothingToTrain { rank }),
            (None, Some(device)) => Ok(Self {
                layout: surveyor.layout,
                occurrences: surveyor.occurrences,
                device,
                several_devices: surveyor.several_devices,
                layers: surveyor.layers,
            }),
        }
    }
}

struct Surveyor {
    rank: usize,
    path: Vec<String>,
    layout: Layout,
    occurrences: Vec<Occurrence>,
    /// Slots by the ids that lead to them: the first field's, and those that [`tied_id`] gives to further ones.
    slots: HashMap<ParamId, usize>,
    /// Of each slot, the first field's id and the number of fields.
    fields: Vec<(ParamId, u64)>,
    /// Of the first trainable parameter.
    device: Option<Device>,
    several_devices: bool,
    layers: Vec<Layer>,
    error: Option<Error>,
}

impl Surveyor {
    fn float<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), Error> {
        let (rank, path) = (self.rank, self.path.join("."));
        let trainable = param.is_require_grad();
        // A lazy parameter takes its value here.
        let base = param.base();
        let Some(dtype) = dtype::float(base.dtype()) else {
            let dtype = format!("{:?}", base.dtype());
            return Err(Error::UnsupportedType { rank, path, dtype });
        };
        let (slot, id) = match self.slots.get(&param.id) {
            Some(&slot) => {
                let (first, fields) = &mut self.fields[slot];
                let id = tied_id(*first, *fields);
                *fields += 1;
                self.slots.insert(tied_id(*first, *fields), slot);
                (slot, id)
            }
            None => {
                let shape = base.dims().to_vec();
                self.layout.params.push(ParamSpec {
                    path,
                    shape,
                    dtype,
                    trainable,
                });
                let slot = self.layout.len() - 1;
                self.slots.insert(param.id, slot);
                self.slots.insert(tied_id(param.id, 1), slot);
                self.fields.push((param.id, 1));
                (slot, param.id)
            }
        };
        let device = base.device();
        if trainable {
            let first = self.device.get_or_insert(device.clone());
            self.several_devices |= *first != device;
            if backend(first) != backend(&device) {
                let path = self.path.join(".");
                return Err(Error::SeveralBackends { rank, path });
            }
        }
        let Some(proxy) = Proxy::new::<D>(id, &device) else {
            return Err(Error::NothingToTrain { rank });
        };
        self.occurrences.push(Occurrence {
            slot,
            id,
            proxy,
            device: ops::device(&base),
            seen: AtomicBool::new(false),
            reloaded: AtomicBool::new(false),
            hooks: OnceLock::new(),
        });
        Ok(())
    }
}

/// What of a device tells its backend from others.
fn backend(device: &Device) -> Discriminant<DispatchDevice> {
    discriminant(device.clone().inner().as_dispatch())
}

/// Whether a parameter is, or may become, one that is trained.
fn can_be_trained<const D: usize>(param: &Param<Tensor<D>>) -> bool {
    let base = param.base();
    param.is_require_grad() || base.is_autodiff() && dtype::float(base.dtype()).is_some()
}

impl ModuleVisitor for Surveyor {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        // The link is a field of the layer.
        if let Some(channels) = layers::last_found() {
            let path = self.path.join(".");
            self.layers.push(Layer { path, channels });
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_none() && can_be_trained(param) {
            self.error = self.float(param).err();
        }
    }
}

/// What all ranks must have in common.
#[derive(Serialize, Deserialize)]
struct Fingerprint {
    version: String,
    options: String,
    layout: Layout,
    layers: Vec<Layer>,
}

fn agree(
    group: &dyn ProcessGroup,
    survey: Result<Survey, Error>,
    config: &WrapConfig,
) -> Result<Survey, Error> {
    let rank = group.rank();
    let survey = together(group, survey)?;
    let ours = Fingerprint {
        version: env!("CARGO_PKG_VERSION").to_string(),
        options: config.describe(),
        layout: survey.layout.clone(),
        layers: survey.layers.clone(),
    };
    let operation = "comparing the models";
    let bytes = encoding::encode(group, operation, &ours)?;
    for (peer, theirs) in objects::gather(group, &bytes)?.iter().enumerate() {
        if *theirs == bytes {
            continue;
        }
        let theirs: Fingerprint = encoding::decode(group, operation, theirs)?;
        let layouts = ours.layout.first_difference(&theirs.layout);
        let (what, ours, theirs) = match layouts {
            Some((ours, theirs)) => ("a parameter", ours, theirs),
            None if ours.layers != theirs.layers => {
                let (ours, theirs) = first_difference(&ours.layers, &theirs.layers);
                ("a SyncBatchNorm layer", ours, theirs)
            }
            None if ours.options != theirs.options => {
                ("the wrap options", ours.options, theirs.options)
            }
            None => ("the version of burn-ddp", ours.version, theirs.version),
        };
        let what = what.to_string();
        return Err(Error::ModelMismatch {
            rank,
            peer,
            what,
            ours,
            theirs,
        });
    }
    Ok(survey)
}

/// Of layers that are not all equal.
fn first_difference(ours: &[Layer], theirs: &[Layer]) -> (String, String) {
    let differs = |index: &usize| ours.get(*index) != theirs.get(*index);
    let index = (0..ours.len().max(theirs.len())).find(differs);
    let name = |layers: &[Layer]| {
        let layer = index.and_then(|index| layers.get(index));
        layer.map_or("nothing (no further layer)".into(), Layer::to_string)
    };
    (name(ours), name(theirs))
}

/// Attaches a hook to every parameter that is, or may become, trained.
struct Attach {
    session: Arc<Session>,
    ladder: Ladder,
    /// Module path of each occurrence.
    paths: Vec<String>,
    hooks: Hooks,
}

/// What `wrap` has put into a model.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    /// By module path.
    params: HashMap<String, ParamHook>,
    exchange: Option<Arc<Exchange>>,
}

impl Hooks {
    /// Hooks `model`, a plain copy of the wrapped one with the same parameter ids. Local, and free of copies.
    #[cfg(feature = "train")]
    pub(crate) fn attach<M: Module>(&self, model: M) -> M {
        let model = model.apply_reparameterization(self);
        match &self.exchange {
            Some(exchange) => layers::bind(model, exchange.clone()),
            None => model,
        }
    }
}

impl Reparameterizer for &Hooks {
    type Reparam = ParamHook;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParamHook>) {
        (param, self.params.get(path).cloned())
    }
}

impl Reparameterizer for &mut Attach {
    type Reparam = ParamHook;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<ParamHook>) {
        if !can_be_trained(&param) {
            return (param, None);
        }
        let occurrence = self.paths.len();
        self.paths.push(path.to_string());
        let alive = Arc::default();
        let hooks = &self.session.occurrences[occurrence].hooks;
        let _ = hooks.set(Arc::downgrade(&alive));
        let hook = ParamHook {
            session: self.session.clone(),
            ladder: self.ladder.clone(),
            occurrence,
            _alive: alive,
        };
        self.hooks.params.insert(path.to_string(), hook.clone());
        let id = self.session.id(occurrence);
        let param = if param.id == id {
            param
        } else {
            own_identity(param, id)
        };
        (watch_loading(param, &self.session, occurrence), Some(hook))
    }
}

/// The id of field number `field` (from 1) of those that share the parameter `first`. It follows from the first one's, so that
/// a model that was saved while wrapped is known to be tied when it is loaded and wrapped again.
pub(crate) fn tied_id(first: ParamId, field: u64) -> ParamId {
    // The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, figure 17).
    let mut z = first
        .val()
        .wrapping_add(field.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ParamId::from(z ^ (z >> 31))
}

/// Gives a field that is tied to an earlier one an id and a leaf of its own.
///
/// Burn's optimizers find a gradient by parameter id and take it away, so of two fields with one id only the first is ever
/// stepped. With ids of their own both fields receive the gradient of all their uses and make the same step, so that they stay equal.
fn own_identity<const D: usize>(param: Param<Tensor<D>>, id: ParamId) -> Param<Tensor<D>> {
    let (_, tensor, mapper) = param.consume();
    let trainable = tensor.is_require_grad();
    let leaf = Tensor::from_inner(tensor.inner()).set_require_grad(trainable);
    Param::from_mapped_value(id, leaf, mapper)
}

/// Lets the session know when the field is loaded from a record. The parameter may outlive the session.
fn watch_loading<const D: usize>(
    param: Param<Tensor<D>>,
    session: &Arc<Session>,
    occurrence: usize,
) -> Param<Tensor<D>> {
    let (id, tensor, mapper) = param.consume();
    let (session, own) = (Arc::downgrade(session), mapper.clone());
    Param::from_mapped_value(id, tensor, mapper).load_mapper(move |tensor| {
        if let Some(session) = session.upgrade() {
            session.reloaded(occurrence);
        }
        own.on_load(tensor)
    })
}

/// A traversal that does nothing but meet every hook.
struct MeetHooks;

impl ModuleVisitor for MeetHooks {}
