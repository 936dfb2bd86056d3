//! How far a step is: a bar on a terminal, nothing in a pipe.

use indicatif::{ProgressBar, ProgressStyle};

/// Where steps show how far they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// On standard error, if that is a terminal.
    Terminal,
    /// Nowhere.
    Silent,
}

impl Progress {
    /// A bar for a step that goes through `total` bytes.
    pub fn bytes(self, step: &str, total: u64) -> ProgressBar {
        self.bar(step, total, "{prefix:<24} {bar:30} {binary_bytes}/{binary_total_bytes} {eta}")
    }

    /// A bar for a step that goes through `total` equal parts.
    pub fn count(self, step: &str, total: u64) -> ProgressBar {
        self.bar(step, total, "{prefix:<24} {bar:30} {pos}/{len} {eta}")
    }

    fn bar(self, step: &str, total: u64, template: &str) -> ProgressBar {
        if self == Self::Silent {
            return ProgressBar::hidden();
        }
        // A bar on standard error draws nothing when that is not a terminal.
        let style = ProgressStyle::with_template(template).expect("the templates above are right");
        ProgressBar::new(total).with_style(style).with_prefix(step.to_string())
    }
}
