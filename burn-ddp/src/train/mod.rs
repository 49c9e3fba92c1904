//! What surrounds the gradient in data-parallel training.
