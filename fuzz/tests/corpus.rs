//! Every target goes through its corpus: what the fuzzer kept because it reached something new, and what once
//! broke a target.

use std::fs;
use std::path::Path;

#[test]
fn no_input_of_the_corpus_breaks_its_target() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, target) in evenhand_fuzz::TARGETS {
        let files =
            fs::read_dir(corpus.join(name)).unwrap_or_else(|error| panic!("no corpus of {name}: {error}"));
        let mut count = 0;
        for file in files {
            let path = file.expect("a file of the corpus").path();
            println!("{}", path.display()); // shown if it panics
            target(&fs::read(&path).expect("a file that can be read"));
            count += 1;
        }
        assert!(count > 0, "the corpus of {name} is empty");
    }
}
