//! The duration classes of a queue, as a user chooses them: `3s: all, 10s: 8, 30s: 25%`.
//!
//! A class is a duration and a limit. Durations grow, limits do not, and the first limit is all slots. A queue without
//! classes has none of this: there a task's duration is a deadline and nothing else.

use std::fmt;

use crate::bounds;
use crate::refusal::Refusal;

/// One class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassLimit {
    /// How long a task of this class may run, in milliseconds.
    pub duration_ms: u64,
    /// How many runs may hold this class or a longer one.
    pub limit: Limit,
}

/// How many runs may hold a class or a longer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// As many as there are slots.
    All,
    /// So many, or as many as there are slots if these are fewer.
    Slots(u32),
    /// So many in a hundred of the slots that exist now, and at least one.
    Percent(u8),
}

impl Limit {
    /// How many that is with so many slots.
    pub fn of(self, slots: u64) -> u64 {
        match self {
            Limit::All => slots,
            Limit::Slots(limit) => u64::from(limit).min(slots),
            Limit::Percent(percent) => (slots * u64::from(percent) / 100).max(1).min(slots),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::All => f.write_str("all"),
            Limit::Slots(limit) => limit.fmt(f),
            Limit::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Checks the classes that a user chose. The field that is wrong is named by its place in the list.
pub fn check(classes: &[ClassLimit]) -> Result<(), Refusal> {
    if classes.len() > usize::from(bounds::CLASSES) {
        let (is, most) = (classes.len(), bounds::CLASSES);
        return Err(Refusal::too_large("classes", format!("has {is} classes; at most {most} are allowed")));
    }
    for (n, class) in classes.iter().enumerate() {
        let wrong = |field: &str, text: String| Err(Refusal::invalid(format!("classes[{n}].{field}"), text));
        if !(1..=bounds::DURATION_MS).contains(&class.duration_ms) {
            let (is, most) = (class.duration_ms, bounds::DURATION_MS);
            return wrong("duration_ms", format!("{is} is out of range; use 1 to {most}"));
        }
        match class.limit {
            Limit::All => {}
            Limit::Slots(0) => {
                return wrong("limit", "0 lets nothing run; use 1 or more, or leave the class out".into());
            }
            Limit::Slots(_) => {}
            Limit::Percent(percent) if (1..=100).contains(&percent) => {}
            Limit::Percent(percent) => {
                return wrong("limit", format!("{percent}% is out of range; use 1% to 100%"));
            }
        }
        let Some(before) = n.checked_sub(1).map(|before| classes[before]) else {
            match class.limit {
                Limit::All | Limit::Percent(100) => continue,
                Limit::Slots(_) | Limit::Percent(_) => {
                    let text = "is the first: its limit must be `all`, as every slot may run something short";
                    return wrong("limit", text.into());
                }
            }
        };
        if class.duration_ms <= before.duration_ms {
            let (is, last) = (class.duration_ms, before.duration_ms);
            return wrong(
                "duration_ms",
                format!("{is} must be longer than {last}, that of the class before"),
            );
        }
        let grows = match (before.limit, class.limit) {
            (Limit::All, _) | (Limit::Percent(100), _) => false,
            (Limit::Slots(_) | Limit::Percent(_), Limit::All) => true,
            (Limit::Slots(before), Limit::Slots(limit)) => limit > before,
            (Limit::Percent(before), Limit::Percent(limit)) => limit > before,
            // Which of them is more depends on how many slots there are; the lower one counts then.
            (Limit::Slots(_), Limit::Percent(_)) | (Limit::Percent(_), Limit::Slots(_)) => false,
        };
        if grows {
            let (is, last) = (class.limit, before.limit);
            return wrong(
                "limit",
                format!("{is} must not be more than {last}, that of the shorter class before"),
            );
        }
    }
    Ok(())
}

/// The limits with so many slots: never more than that of a shorter class.
pub fn limits(classes: &[ClassLimit], slots: u64) -> Vec<u64> {
    let mut least = slots;
    let of = |class: &ClassLimit| {
        least = least.min(class.limit.of(slots));
        least
    };
    classes.iter().map(of).collect()
}

/// The shortest class that is long enough for this duration; None if none is.
pub fn covering(classes: &[ClassLimit], duration_ms: u64) -> Option<usize> {
    let shorter = classes.partition_point(|class| class.duration_ms < duration_ms);
    (shorter < classes.len()).then_some(shorter)
}

/// A duration as people write it, and read it back: 250ms, 3s, 1.5s, 5m, 2h, 1d. What a class is called.
pub fn name(ms: u64) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    match units.into_iter().find(|(unit, _)| ms > 0 && ms.is_multiple_of(*unit)) {
        Some((unit, letter)) => format!("{}{letter}", ms / unit),
        None if ms < 1_000 => format!("{ms}ms"),
        None => format!("{}s", ms as f64 / 1_000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(duration_ms: u64, limit: Limit) -> ClassLimit {
        ClassLimit { duration_ms, limit }
    }

    #[test]
    fn a_wrong_list_is_refused_by_its_field() {
        use Limit::{All, Percent, Slots};
        let refused = |classes: &[ClassLimit]| check(classes).map_err(|refusal| refusal.to_string());
        assert_eq!(refused(&[]), Ok(()));
        assert_eq!(refused(&[class(3, All), class(10, Slots(8)), class(30, Slots(8))]), Ok(()));
        assert_eq!(refused(&[class(3, Percent(100)), class(10, Percent(50)), class(30, Slots(1))]), Ok(()));
        for (classes, why) in [
            (vec![class(3, Slots(8))], "classes[0].limit: is the first: its limit must be `all`"),
            (vec![class(0, All)], "classes[0].duration_ms: 0 is out of range"),
            (vec![class(3, All), class(3, All)], "classes[1].duration_ms: 3 must be longer than 3"),
            (vec![class(3, All), class(4, Slots(0))], "classes[1].limit: 0 lets nothing run"),
            (vec![class(3, All), class(4, Percent(101))], "classes[1].limit: 101% is out of range"),
            (
                vec![class(3, All), class(4, Slots(2)), class(5, Slots(3))],
                "classes[2].limit: 3 must not be more than 2",
            ),
            (vec![class(3, All), class(4, Percent(9)), class(5, All)], "classes[2].limit: all must not be"),
        ] {
            let refusal = refused(&classes).unwrap_err();
            assert!(refusal.contains(why), "{refusal}");
        }
        let many: Vec<_> = (1..=17).map(|n| class(n, All)).collect();
        assert!(refused(&many).unwrap_err().contains("has 17 classes"));
    }

    #[test]
    fn limits_follow_the_slots_and_never_grow() {
        use Limit::{All, Percent, Slots};
        let classes = [class(1, All), class(2, Percent(50)), class(3, Slots(3)), class(4, Percent(20))];
        assert_eq!(limits(&classes, 10), [10, 5, 3, 2]);
        assert_eq!(limits(&classes, 4), [4, 2, 2, 1], "a number is no more than a percentage before it");
        assert_eq!(limits(&classes, 1), [1, 1, 1, 1], "a percentage is never below one");
        assert_eq!(limits(&classes, 0), [0, 0, 0, 0]);
    }

    #[test]
    fn a_duration_belongs_to_the_shortest_class_that_covers_it() {
        let classes = [class(3_000, Limit::All), class(10_000, Limit::All)];
        let of = |ms| covering(&classes, ms);
        assert_eq!(
            [of(1), of(3_000), of(3_001), of(10_000), of(10_001)],
            [Some(0), Some(0), Some(1), Some(1), None]
        );
    }

    #[test]
    fn a_class_is_called_by_its_duration() {
        let names = [1, 250, 1_000, 1_500, 90_000, 300_000, 7_200_000, 86_400_000].map(name);
        assert_eq!(names, ["1ms", "250ms", "1s", "1.5s", "90s", "5m", "2h", "1d"]);
    }
}
