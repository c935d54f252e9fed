//! Where a PostgreSQL store is: `postgres://user:password@host:port/database?…`, as everybody writes it. Some parameters
//! are ours, or understood better here than by the driver:
//!
//! | parameter | means |
//! |---|---|
//! | `schema` | where the tables are; `evenhand` if nothing is said |
//! | `sslmode` | `disable`; `prefer` (encrypt if the server can); `require` (encrypt); `verify-full` (and be sure of the server) |
//! | `sslrootcert` | a file of certificates that the server's must follow from: it is verified then, in every mode |
//!
//! As with other programs, `prefer` and `require` alone protect from those who listen, not from those who pretend to be
//! the server.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use super::errors::OpenError;

/// The schema if nothing is said.
const SCHEMA: &str = "evenhand";
/// Longest name that PostgreSQL keeps in full.
const NAME_BYTES: usize = 63;

/// An address that was understood.
#[derive(Clone, Debug)]
pub(super) struct Address {
    pub(super) config: Config,
    pub(super) schema: String,
    /// Be sure of the server: by these certificates, or by those of the operating system.
    pub(super) verify: bool,
    pub(super) roots: Option<PathBuf>,
}

fn wrong(what: impl Into<String>) -> OpenError {
    OpenError::Address { what: what.into() }
}

impl FromStr for Address {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<Address, OpenError> {
        if !["postgres://", "postgresql://"].iter().any(|scheme| text.starts_with(scheme)) {
            return Err(wrong("it does not begin with postgres://"));
        }
        let (base, query) = text.split_once('?').unwrap_or((text, ""));
        let (mut schema, mut verify, mut roots, mut mode) =
            (SCHEMA.to_string(), false, None, SslMode::Prefer);
        let mut others = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            match parameter.split_once('=') {
                Some(("schema", name)) => schema = checked(&decoded(name)?)?,
                Some(("sslrootcert", file)) => roots = Some(PathBuf::from(decoded(file)?)),
                Some(("sslmode", "disable")) => mode = SslMode::Disable,
                Some(("sslmode", "prefer")) => mode = SslMode::Prefer,
                Some(("sslmode", "require")) => mode = SslMode::Require,
                Some(("sslmode", "verify-full")) => (mode, verify) = (SslMode::Require, true),
                Some(("sslmode", other)) => {
                    let modes = "use disable, prefer, require or verify-full";
                    return Err(wrong(format!("there is no sslmode {other:?}; {modes}")));
                }
                Some(_) | None => others.push(parameter),
            }
        }
        let rest = if others.is_empty() { base.to_string() } else { format!("{base}?{}", others.join("&")) };
        // The driver's message names the part that is wrong, and not the password.
        let mut config = Config::from_str(&rest).map_err(|error| wrong(super::errors::told(&error)))?;
        config.ssl_mode(mode);
        if config.get_application_name().is_none() {
            config.application_name("evenhand");
        }
        // A network that went silent is noticed within half a minute.
        config.keepalives_idle(Duration::from_secs(15)).keepalives_interval(Duration::from_secs(5));
        config.keepalives_retries(3).tcp_user_timeout(Duration::from_secs(30));
        let verify = verify || (roots.is_some() && mode != SslMode::Disable);
        Ok(Address { config, schema, verify, roots })
    }
}

/// A schema's name, which stands in statements as it is.
fn checked(name: &str) -> Result<String, OpenError> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let begins = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_') && !name.starts_with("pg_");
    if !begins || name.len() > NAME_BYTES || !name.chars().all(plain) {
        let rule = "use small letters, digits and `_`, beginning with a letter, and not with pg_";
        return Err(wrong(format!("schema {name:?} is no name; {rule}")));
    }
    Ok(name.into())
}

/// A parameter without its percent signs.
fn decoded(text: &str) -> Result<String, OpenError> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()].map(|digit| char::from(digit.unwrap_or(b'?')).to_digit(16));
        match digits {
            [Some(high), Some(low)] => bytes.push((high * 16 + low) as u8),
            [_, _] => return Err(wrong(format!("{text:?} has a % without two digits behind it"))),
        }
    }
    String::from_utf8(bytes).map_err(|_| wrong(format!("{text:?} is no text")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_parameters_are_taken_out_and_the_others_left() {
        let text = "postgres://me@db:5433/work?schema=team_1&connect_timeout=3&sslmode=verify-full&sslrootcert=/a%20b";
        let address: Address = text.parse().unwrap();
        assert_eq!((address.schema.as_str(), address.verify), ("team_1", true));
        assert_eq!(address.roots, Some(PathBuf::from("/a b")));
        assert_eq!(address.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(address.config.get_dbname(), Some("work"));
        assert_eq!(address.config.get_ssl_mode(), SslMode::Require);
        let address: Address = "postgresql://db/work".parse().unwrap();
        assert_eq!((address.schema.as_str(), address.verify, address.roots), ("evenhand", false, None));
        assert_eq!(address.config.get_ssl_mode(), SslMode::Prefer);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_a_reason() {
        for (text, reason) in [
            ("mysql://db", "begin with postgres://"),
            ("postgres://db?schema=Bad", "no name"),
            ("postgres://db?schema=a;drop", "no name"),
            ("postgres://db?schema=", "no name"),
            ("postgres://db?schema=pg_x", "no name"),
            ("postgres://db?sslmode=verify-ca", "no sslmode"),
            ("postgres://db?sslrootcert=%4", "without two digits"),
            ("postgres://db?nonsense=1", "nonsense"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
