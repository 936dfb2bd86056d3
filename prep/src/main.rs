//! The command line of np-prep.
fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    np_prep::import(arguments[1].as_ref(), arguments[2].as_ref(), None, np_prep::Progress::Terminal).unwrap();
}
