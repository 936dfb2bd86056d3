//! Tests that span crates. One binary, one module a theme; the programs under test are started as a user starts them.

mod damage;
mod kill;
mod main_job;
mod programs;
mod tidy;
mod tiny;
