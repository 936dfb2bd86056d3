//! Tests that span crates. One binary, one module a theme; the programs under test are started as a user starts them.

mod active_sets;
mod collect;
mod damage;
mod equality;
mod faults;
mod golden;
mod kill;
mod main_job;
mod programs;
mod reference;
mod smollm2;
mod tidy;
mod tiny;
mod trained;
