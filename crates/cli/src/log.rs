//! What long-running commands say while they run: on standard error, readable on a terminal, JSON on request.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::Failure;

/// How to log.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// What to log: error, warn, info, debug, or a filter such as info,evenhand_server=debug
    #[arg(long, env = "EVENHAND_LOG", default_value = "info", value_name = "FILTER", hide_env_values = true)]
    log: String,
    /// Log for people, or one JSON object per line
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    log_format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

impl LogArgs {
    /// Begins to log.
    pub(crate) fn begin(&self) -> Result<(), Failure> {
        let filter = EnvFilter::try_new(&self.log)
            .map_err(|error| Failure { text: format!("--log {:?}: {error}", self.log), exit: 2 })?;
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        let begun = match self.log_format {
            Format::Json => log.json().flatten_event(true).try_init(),
            Format::Text => {
                log.with_ansi(std::io::stderr().is_terminal()).with_target(false).compact().try_init()
            }
        };
        begun.map_err(Failure::new)
    }
}
