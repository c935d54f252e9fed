//! What every store must do, as one suite that each backend's tests run unchanged. A backend says how to
//! get an empty store and how to open the same data again ([`Harness`]), and writes one line:
//!
//! ```text
//! conformance::suite!(MyHarness::default(), block_on);
//! ```
//!
//! which makes one test per case, named for what the case protects. The cases know nothing of any
//! backend and speak only through [`Store`]; they assume no more than the trait promises
//! and what an owner really does: levels and task ids are never used twice, the ack level never falls.
//! They wait for nothing and draw no random numbers, so a failure is always a failure.
//!
//! Read `given` first (the owner, the tasks and the whole contents of a shard, as the cases see them),
//! then `taking`, `fencing`, `commits`, `rows`, `acks`, `timers`, `parked`, `tasks`, `lives`, `listing` and `values`.
//!
//! To add a case, write it in the module it belongs to and add its name to `conformance_list`. A case
//! that is not in the list is an unused function, which the lints refuse.

use std::future::Future;

use crate::Store;

mod acks;
mod commits;
mod fencing;
mod given;
mod listing;
mod lives;
mod parked;
mod rows;
mod taking;
mod tasks;
mod timers;
mod values;

/// How a backend's tests provide its stores.
pub trait Harness {
    /// The backend.
    type Store: Store;

    /// An empty store, which shares nothing with those of other tests.
    fn fresh(&self) -> impl Future<Output = Self::Store>;

    /// Closes the store without grace, as a crash would, and opens the same data again.
    fn reopen(&self, store: Self::Store) -> impl Future<Output = Self::Store>;
}

/// The one list of cases. Hands it to another macro of this crate.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_list {
    ($then:ident $arguments:tt) => {
        $crate::$then! { $arguments
            taking: a_new_shard_is_empty_at_an_epoch_above_zero;
            taking: a_shard_that_nobody_took_takes_no_commit;
            taking: taking_raises_the_epoch_every_time;
            taking: two_takes_at_once_get_two_epochs;
            taking: taking_returns_the_metadata_last_committed;
            taking: doubt_is_remembered_until_it_is_not;
            taking: an_epoch_that_a_worker_has_shown_is_left_behind_in_doubt;
            taking: an_epoch_that_none_could_be_above_is_refused;
            taking: taking_changes_nothing_but_the_epoch;
            taking: taking_returns_every_one_of_100_000_keys;
            taking: reopening_keeps_everything_and_the_epoch_goes_on_rising;

            fencing: a_zombie_owner_changes_nothing_by_any_kind_of_change;
            fencing: a_fenced_commit_changes_nothing_at_all;
            fencing: a_zombie_owner_deletes_nothing_of_what_its_successor_accepted;
            fencing: a_fenced_commit_of_no_changes_is_refused;
            fencing: an_epoch_that_nobody_was_given_is_refused;
            fencing: the_epoch_of_another_shard_is_refused;
            fencing: a_fenced_owner_can_take_the_shard_again;
            fencing: a_write_that_arrived_before_the_take_over_is_seen_by_it;
            fencing: a_late_write_fails_or_was_seen_by_the_take_over;
            fencing: a_commit_that_races_a_take_over_happened_before_it_or_fails;
            fencing: a_commit_given_up_half_way_is_all_or_nothing;

            commits: a_read_sees_every_commit_acknowledged_before_it;
            commits: a_commit_of_no_changes_changes_nothing;
            commits: the_last_change_of_a_record_in_a_commit_wins;
            commits: a_task_accepted_and_finished_in_one_commit_leaves_nothing;
            commits: a_task_may_move_several_times_in_one_commit;
            commits: the_largest_enqueue_by_tasks_is_one_commit;
            commits: the_largest_enqueue_by_bytes_is_one_commit;
            commits: a_commit_may_touch_many_lanes_and_keys;
            commits: commits_of_two_shards_at_once_both_happen;

            rows: rows_come_in_the_order_of_levels_whatever_order_they_were_written_in;
            rows: a_read_starts_above_its_level;
            rows: a_read_returns_no_more_than_its_limit;
            rows: the_end_of_a_lane_is_exact;
            rows: paging_gives_every_row_once;
            rows: lanes_do_not_leak_into_each_other;
            rows: lanes_do_not_delete_in_each_other;
            rows: shards_do_not_leak_into_each_other;

            acks: an_ack_deletes_the_rows_at_or_below_it_and_none_above;
            acks: an_ack_rides_in_the_commit_that_settles_what_is_below_it;
            acks: rows_settled_below_a_saved_ack_are_not_passed_over;
            acks: a_long_runner_set_aside_leaves_no_deleted_rows_to_pass_over;
            acks: a_read_passes_over_no_more_rows_than_were_deleted_above_the_ack;

            timers: timers_come_in_the_order_of_levels_whatever_order_they_were_set_in;
            timers: paging_gives_every_timer_once_and_an_exact_end;
            timers: a_timer_that_is_not_needed_any_more_goes_alone;
            timers: an_ack_deletes_the_timers_at_or_below_it_and_none_above;
            timers: an_ack_rides_in_the_commit_that_handles_what_is_below_it;
            timers: timers_below_a_saved_ack_are_not_passed_over;
            timers: timers_and_lanes_do_not_leak_into_each_other;

            parked: parked_rows_stay_with_their_keys_and_come_in_order;
            parked: a_row_goes_to_the_shelf_and_leaves_it;
            parked: lanes_of_one_queue_park_the_same_key_apart;
            parked: parked_keys_are_remembered_until_they_are_not;
            parked: paused_keys_are_remembered_until_they_are_not;

            tasks: a_task_that_is_not_there_is_none;
            tasks: finishing_removes_one_task_and_its_row;
            tasks: requeueing_moves_one_row_and_updates_its_task;
            tasks: setting_aside_takes_one_row_away_and_keeps_its_task;
            tasks: a_task_set_aside_can_be_requeued;
            tasks: a_task_set_aside_can_be_finished;

            lives: a_task_goes_from_any_place_to_any_other;
            lives: a_task_is_shortened_wherever_it_is;
            lives: a_charge_keeps_what_it_says_wherever_its_task_is;
            lives: an_end_that_is_not_remembered_leaves_nothing;
            lives: an_end_is_remembered_until_it_is_forgotten;
            lives: a_task_may_come_end_and_be_forgotten_in_one_commit;
            lives: the_last_tries_of_a_task_are_remembered;
            lives: a_task_that_is_not_there_has_no_history;
            lives: the_latest_replay_of_a_task_is_remembered;
            lives: a_cancel_is_remembered_until_its_task_has_ended;
            lives: many_ends_are_forgotten_together;

            listing: tasks_are_listed_by_id_wherever_they_are;
            listing: a_listing_of_one_queue_shows_that_queue_alone;
            listing: whether_more_follow_is_exact;
            listing: listing_by_pages_gives_every_task_once;
            listing: a_listing_is_bounded_in_bytes;
            listing: tasks_that_have_ended_are_listed_apart_from_those_that_have_not;
            listing: a_listing_of_ended_tasks_is_bounded_in_bytes;
            listing: tasks_that_come_and_go_between_pages_hide_and_repeat_no_others;

            values: payloads_come_back_byte_for_byte;
            values: files_come_back_byte_for_byte_under_their_names;
            values: keys_come_back_as_they_are_and_stay_apart;
            values: keys_of_neighbouring_lanes_and_queues_stay_apart;
            values: queue_names_come_back_as_they_are;
            values: tasks_keep_numbers_at_their_limits;
            values: records_keep_numbers_at_their_limits;
            values: timers_keep_numbers_at_their_limits;
            values: tries_and_ends_come_back_as_they_were;
            values: requests_and_settings_come_back_as_they_were;
        }
    };
}

/// Makes the cases of the list public here.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_names {
    ([] $($module:ident: $case:ident;)+) => {
        $(pub use $module::$case;)+
    };
}

/// Makes one test per case of the list.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_tests {
    ([$harness:expr, $block_on:expr] $($module:ident: $case:ident;)+) => {
        $(
            #[test]
            fn $case() {
                let harness = $harness;
                $block_on($crate::conformance::$case(&harness));
            }
        )+
    };
}

/// Makes one test per case, for a harness and a function that runs a future to its end.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_suite {
    ($harness:expr, $block_on:expr $(,)?) => {
        $crate::conformance_list! { conformance_tests [$harness, $block_on] }
    };
}

#[doc(inline)]
pub use conformance_suite as suite;

conformance_list! { conformance_names [] }
