//! The kernels of the bundle on one card: modules loaded when the card is opened, functions when an op first needs them,
//! always outside of steps.

use std::{collections::HashMap, sync::Arc};

use freetoken_backend::Result;

use crate::{
    driver::{Driver, Kernel, Module},
    launch::Launch,
};

/// Loaded modules, and the functions that were asked for.
pub(crate) struct Modules {
    modules: Vec<Arc<Module>>,
    kernels: HashMap<&'static str, Entry>,
}

struct Entry {
    kernel: Kernel,
    /// The function's limit of dynamic shared memory: the most that a launch asked for.
    shared_bytes: u32,
}

impl Modules {
    /// Loads every image: cubins or PTX text.
    pub(crate) fn load<I: AsRef<[u8]>>(driver: &Driver, images: impl IntoIterator<Item = I>) -> Result<Self> {
        let modules = images.into_iter().map(|image| driver.module(image.as_ref())).collect::<Result<_>>()?;
        Ok(Modules { modules, kernels: HashMap::new() })
    }

    /// The function of a launch, ready for it. Asserts that the bundle has it.
    pub(crate) fn kernel(&mut self, driver: &Driver, launch: &Launch) -> Result<Kernel> {
        let name = launch.kernel;
        if !self.kernels.contains_key(name) {
            let mut found = None;
            for module in &self.modules {
                found = driver.kernel(module, name)?;
                if found.is_some() {
                    break;
                }
            }
            let kernel = found.unwrap_or_else(|| panic!("the bundle has no kernel `{name}`"));
            self.kernels.insert(name, Entry { kernel, shared_bytes: 0 });
        }
        let entry = self.kernels.get_mut(name).expect("inserted above");
        if launch.shared_bytes > entry.shared_bytes {
            driver.allow_shared(&entry.kernel, launch.shared_bytes)?;
            entry.shared_bytes = launch.shared_bytes;
        }
        Ok(entry.kernel.clone())
    }
}
