//! The thread on which a template is parsed and rendered. Its stack is deep enough for the deepest expression or value
//! that the bounds on source and instructions allow: the engine recurses over both. Knows nothing of templates.

use super::TemplateError;
use std::thread;

/// Address space, not memory: pages count when they are touched.
const STACK_BYTES: usize = 512 << 20;

/// Runs `work`; a panic in it, or a thread that cannot be had, is an error.
pub(super) fn on_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    let failed = |message: &str| Err(TemplateError::Engine { message: message.into() });
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("chat template".into()).stack_size(STACK_BYTES);
        match thread.spawn_scoped(scope, work).map(|running| running.join()) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => failed("the template engine panicked"),
            Err(_) => failed("no address space for the stack of its thread"),
        }
    })
}
