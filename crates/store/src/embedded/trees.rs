//! All kinds of rows together: what a frame of the log does to them, and what each kind is.

use std::collections::BTreeMap;
use std::sync::Arc;

use evenhand_core::backlog::Level;

use super::bytes::{Get, Value};
use super::layout::{self, Kind, LanePrefix, RecordKey, RowKey, TaskKey};
use super::manifest::Standing;
use super::table::TableKey;
use super::tree::{Layer, Tree};
use crate::values;

/// All rows, and what the writer must know at once.
#[derive(Debug)]
pub(super) struct Trees {
    pub(super) rows: Tree<RowKey>,
    pub(super) tasks: Tree<TaskKey>,
    pub(super) records: Tree<RecordKey>,
    /// Rows at or below are gone, whether or not a delete says so.
    pub(super) acks: Acks,
}

/// The ack level of every lane, and of the timers.
pub(super) type Acks = BTreeMap<LanePrefix, Level>;

/// A kind of row that has a tree.
pub(super) trait Planted: TableKey {
    fn tree(trees: &Trees) -> &Tree<Self>;
    fn layers(standing: &mut Standing) -> &mut Vec<Layer<Self>>;

    /// Whether it is a row at or below its lane's ack level, and so settled.
    fn is_settled(&self, _: &Acks) -> bool {
        false
    }
}

macro_rules! planted {
    ($key:ty, $field:ident $(, $more:item)?) => {
        impl Planted for $key {
            fn tree(trees: &Trees) -> &Tree<Self> {
                &trees.$field
            }
            fn layers(standing: &mut Standing) -> &mut Vec<Layer<Self>> {
                &mut standing.$field
            }
            $($more)?
        }
    };
}

planted!(
    RowKey,
    rows,
    fn is_settled(&self, acks: &Acks) -> bool {
        acks.get(&layout::lane_of(self)).is_some_and(|ack| layout::level_of(self) <= *ack)
    }
);
planted!(TaskKey, tasks);
planted!(RecordKey, records);

impl Trees {
    pub(super) fn of(standing: &Standing) -> Trees {
        Trees {
            rows: Tree::new(Kind::Rows, standing.rows.clone()),
            tasks: Tree::new(Kind::Tasks, standing.tasks.clone()),
            records: Tree::new(Kind::Records, standing.records.clone()),
            acks: BTreeMap::new(),
        }
    }

    /// Does what a frame says. None if it says nothing that we know.
    pub(super) fn apply(&mut self, buffer: &Arc<Vec<u8>>, start: usize, end: usize) -> Option<()> {
        let get = &mut Get::from(&buffer[..end], start);
        while !get.is_done() {
            let op = layout::next_op(get)?;
            let value = op.value.map(|(start, end)| Value::new(buffer, start, end));
            match op.kind {
                Kind::Rows => change(&mut self.rows, op.key, value)?,
                Kind::Tasks => change(&mut self.tasks, op.key, value)?,
                Kind::Records => {
                    if let (Some(lane), Some(value)) = (layout::lane_of_record(op.key), &value) {
                        let ack = values::ack(value.bytes())?;
                        self.acks.insert(lane, ack);
                        self.rows.forget(layout::row_key(lane, Level::ZERO), layout::row_key(lane, ack));
                    }
                    change(&mut self.records, op.key, value)?;
                }
            }
        }
        Some(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.active.is_empty() && self.tasks.active.is_empty() && self.records.active.is_empty()
    }
}

fn change<K: TableKey>(tree: &mut Tree<K>, key: &[u8], value: Option<Value>) -> Option<()> {
    let key = K::from_bytes(key)?;
    match value {
        Some(value) => tree.put(key, value),
        None => tree.delete(key),
    }
    Some(())
}
