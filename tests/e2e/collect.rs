//! Collection within little memory sees what collection with much memory sees.

use crate::programs::{program, succeed};
use crate::tiny::{Tiny, text};
use np_formats::{Features, LayerTrace, Manifest, Mask};
use std::fs;
use std::path::{Path, PathBuf};

const LAYERS: usize = 12;

fn collected(folder: &Path, name: &str, memory: &str) -> PathBuf {
    let artifact = folder.join(name);
    succeed(program("np-prep").arg("repack").args([&folder.join("checkpoint"), &artifact]));
    let words = folder.join("text.txt");
    let limits = ["--tokens", "640", "--sequence", "128", "--memory", memory];
    succeed(program("np-prep").arg("collect").arg(&artifact).arg("--text").arg(words).args(limits));
    artifact
}

/// 200 KiB hold neither a layer (96 KiB of rows in a third of it) nor more than one sequence.
#[test]
fn little_memory_gives_the_same_traces() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let tiny = Tiny::new(5);
    tiny.write(&folder.join("checkpoint"));
    fs::write(folder.join("text.txt"), text(5, 2_000)).unwrap();
    let (little, much) = (collected(folder, "little.np", "200KiB"), collected(folder, "much.np", "1GiB"));
    let parent = Manifest::open(&little).unwrap().fingerprint;
    let features = |artifact| Features::read(artifact, tiny.hidden, parent).unwrap();
    let (a, b) = (features(&little), features(&much));
    assert_eq!((a.tokens(), &a.sequence_starts), (640, &b.sequence_starts));
    assert_eq!(a.sequence_starts, [0, 128, 256, 384, 512]);
    // Products of another number of tokens may be added in another order.
    let worst = a.values.iter().zip(&b.values).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-4, "features differ by {worst}");
    for layer in 1..LAYERS {
        let trace = |artifact| LayerTrace::read(artifact, layer, tiny.neurons, parent).unwrap();
        let (a, b) = (trace(&little), trace(&much));
        assert_eq!((a.count, b.count), (635, 635), "the first token of a sequence is in no sum");
        let words = a.words();
        for (name, a, b, count) in
            [("joint", &a.joint, &b.joint, 96), ("gate", &a.gate, &b.gate, 136), ("up", &a.up, &b.up, 136)]
        {
            let mut same = 0;
            for (a, b) in a.chunks_exact(words).zip(b.chunks_exact(words)) {
                let mask = |words| Mask::from_words(tiny.neurons, words).unwrap();
                assert_eq!((mask(a).count(), mask(b).count()), (count, count), "{name}, layer {layer}");
                same += mask(a).count_and(&mask(b));
            }
            let share = same as f64 / (640 * count) as f64;
            assert!(share > 0.999, "{name}, layer {layer}: {share} of the members agree");
        }
    }
}
