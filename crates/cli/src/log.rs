//! What long-running commands say while they run: on standard error, readable on a terminal, JSON on request.

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

use crate::Failure;
use crate::terminal::Stream;

/// How to log.
#[derive(Clone, Debug, Args)]
pub(crate) struct LogArgs {
    /// What to log: error, warn, info, debug, or a filter such as info,evenhand_server=debug
    #[arg(long, env = "EVENHAND_LOG", default_value = "info", value_parser = filter, value_name = "FILTER")]
    log: String,
    /// Log for people, or one JSON object per line
    #[arg(long, env = "EVENHAND_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    log_format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// A filter that can be read.
fn filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.into()).map_err(|error| error.to_string())
}

impl LogArgs {
    /// Begins to log.
    pub(crate) fn begin(&self) -> Result<(), Failure> {
        let filter = EnvFilter::try_new(&self.log).map_err(Failure::new)?;
        let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        let begun = match self.log_format {
            Format::Json => log.json().flatten_event(true).try_init(),
            Format::Text => {
                log.with_ansi(Stream::Err.paint().is_on()).with_target(false).compact().try_init()
            }
        };
        begun.map_err(Failure::new)
    }
}
