//! Columns: how what a commit writes travels to PostgreSQL. A function of the schema gets one array for each column, in
//! the binary form of the protocol; [`Call`] nests the functions of a commit into one statement.

use std::error::Error;

use evenhand_core::backlog::{Level, VTime};
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{IsNull, ToSql, Type, accepts, to_sql_checked};

/// A column, or a single value, and its type.
pub(super) type Column<'a> = (Box<dyn ToSql + Sync + Send + 'a>, Type);

/// Makes a function for columns of a type.
macro_rules! column {
    ($($(#[$doc:meta])* $name:ident($type:ident);)+) => {
        $(
            $(#[$doc])*
            pub(super) fn $name<'a, T: ToSql + Sync + Send + 'a>(values: impl IntoIterator<Item = T>) -> Column<'a> {
                (Box::new(values.into_iter().collect::<Vec<T>>()), Type::$type)
            }
        )+
    };
}

column! {
    /// Of numbers.
    int8(INT8_ARRAY);
    /// Of smaller ones.
    int4(INT4_ARRAY);
    /// Of the smallest.
    int2(INT2_ARRAY);
    /// Of truths.
    bools(BOOL_ARRAY);
    /// Of texts.
    texts(TEXT_ARRAY);
    /// Of bytes.
    bytes(BYTEA_ARRAY);
}

/// One value.
pub(super) fn one<'a, T: ToSql + Sync + Send + 'a>(value: T, kind: Type) -> Column<'a> {
    (Box::new(value), kind)
}

/// Sixteen bytes that sort as the number does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sorted([u8; 16]);

impl From<Level> for Sorted {
    fn from(level: Level) -> Sorted {
        Sorted(level.to_bytes())
    }
}

impl From<VTime> for Sorted {
    fn from(time: VTime) -> Sorted {
        Sorted(time.to_bits().to_be_bytes())
    }
}

impl From<u128> for Sorted {
    fn from(number: u128) -> Sorted {
        Sorted(number.to_be_bytes())
    }
}

impl ToSql for Sorted {
    fn to_sql(&self, kind: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        (&self.0[..]).to_sql(kind, out)
    }

    accepts!(BYTEA);
    to_sql_checked!();
}

/// A statement that is being put together from the inside.
pub(super) struct Call<'a> {
    schema: &'a str,
    text: String,
    pub(super) columns: Vec<Column<'a>>,
}

impl<'a> Call<'a> {
    /// Begins with a function that gets nothing but these.
    pub(super) fn new(schema: &'a str, function: &str, columns: Vec<Column<'a>>) -> Call<'a> {
        let mut call = Call { schema, text: String::new(), columns: Vec::new() };
        call.add(function, columns);
        call
    }

    /// What there is so far happens first; then this function does what it does to the shard.
    pub(super) fn add(&mut self, function: &str, columns: Vec<Column<'a>>) {
        let before = (!self.text.is_empty()).then(|| std::mem::take(&mut self.text));
        let first = self.columns.len() + 1;
        let numbered = (first..first + columns.len()).map(|n| format!("${n}"));
        let arguments: Vec<String> = before.into_iter().chain(numbered).collect();
        self.text = format!("{}.{function}({})", self.schema, arguments.join(", "));
        self.columns.extend(columns);
    }

    /// The statement.
    pub(super) fn statement(&self) -> String {
        format!("SELECT {}", self.text)
    }
}
