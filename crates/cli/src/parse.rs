//! What people type: durations, weights, queues with weights.

use std::time::Duration;

/// Reads a duration: 250ms, 3s, 5m, 2h, 1d.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; write 250ms, 3s, 5m, 2h or 1d");
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(at);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = match unit {
        "ms" => 1.0,
        "s" => 1e3,
        "m" => 60e3,
        "h" => 3600e3,
        "d" => 24.0 * 3600e3,
        _ => return Err(wrong()),
    };
    let ms = number * unit;
    if !(1.0..=1e12).contains(&ms) {
        return Err(format!("{text:?} is out of range; use 1ms to 10000d"));
    }
    Ok(Duration::from_millis(ms.round() as u64))
}

/// Reads where a server is.
pub(crate) fn server(text: &str) -> Result<String, String> {
    match text.strip_prefix("http://").is_some_and(|host| !host.is_empty()) {
        true => Ok(text.trim_end_matches('/').into()),
        false => Err(format!("{text:?} is no address; one looks like {}", evenhand::DEFAULT_SERVER)),
    }
}

/// Reads a weight, in thousandths: 0.001 to 1000, three decimals.
pub(crate) fn weight(text: &str) -> Result<u32, String> {
    let wrong =
        || format!("{text:?} is no weight; write a number from 0.001 to 1000, with at most three decimals");
    let number: f64 = text.parse().map_err(|_| wrong())?;
    let thousandths = number * 1e3;
    if !(1.0..=1e6).contains(&thousandths) || (thousandths - thousandths.round()).abs() > 1e-6 {
        return Err(wrong());
    }
    Ok(thousandths.round() as u32)
}

/// Reads QUEUE or QUEUE=WEIGHT.
pub(crate) fn queue(text: &str) -> Result<(String, u32), String> {
    let (name, weight) = match text.split_once('=') {
        Some((name, of)) => (name, weight(of)?),
        None => (text, 1_000),
    };
    evenhand_core::names::QueueName::new(name).map_err(|refusal| refusal.message)?;
    Ok((name.into(), weight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_weights_and_queues_are_read() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1_500)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7_200)));
        for wrong in ["", "3", "s", "-3s", "3 s", "3w", "1e99d", "0s", "1..2s"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(weight("2.5"), Ok(2_500));
        for wrong in ["", "0", "-1", "0.0001", "1.0005", "1001", "nan", "x"] {
            assert!(weight(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(queue("render=3"), Ok(("render".into(), 3_000)));
        assert_eq!(queue("render"), Ok(("render".into(), 1_000)));
        assert!(queue("a/b").is_err() && queue("=3").is_err() && queue("a=0").is_err());
    }
}
