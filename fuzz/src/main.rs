//! libFuzzer around one of the targets: `EVENHAND_FUZZ=rest fuzz CORPUS`. `make fuzz` does all of them.
#![no_main]

use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("EVENHAND_FUZZ").unwrap_or_default();
        let found = evenhand_fuzz::TARGETS.iter().find(|(target, _)| *target == name);
        found.unwrap_or_else(|| panic!("EVENHAND_FUZZ names no target: {name:?}")).1
    });
    target(bytes);
});
