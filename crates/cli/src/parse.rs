//! What people type: durations, times, weights, queues with weights, classes, limits, rates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use evenhand_api::rest::{ClassLimit, Limit, Rate, RateUnit};

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

/// The same, or 0: none at all.
pub(crate) fn duration_or_zero(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let is_zero = text == "0" || (digits == "0" && duration(&text.replacen('0', "1", 1)).is_ok());
    if is_zero { Ok(Duration::ZERO) } else { duration(text) }
}

/// Reads a moment, as RFC 3339 writes it: 2026-11-16T09:30:00Z, 2026-11-16T10:30:00.5+01:00.
pub(crate) fn time(text: &str) -> Result<SystemTime, String> {
    moment(text).ok_or_else(|| {
        format!("{text:?} is no time; write 2026-11-16T09:30:00Z or 2026-11-16T10:30:00+01:00")
    })
}

/// Reads a moment, or how long ago it was.
pub(crate) fn time_or_ago(text: &str) -> Result<SystemTime, String> {
    let ago = |past| SystemTime::now().checked_sub(past);
    let wrong = || {
        format!("{text:?} is no time; write 2026-11-16T09:30:00Z, or how long ago it was: 30s, 5m, 2h, 1d")
    };
    moment(text).or_else(|| duration(text).ok().and_then(ago)).ok_or_else(wrong)
}

fn moment(text: &str) -> Option<SystemTime> {
    let number = |from: usize, to: usize| {
        let digits = text.get(from..to).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u64>().ok()
    };
    let sign = |at: usize, signs: &[u8]| text.as_bytes().get(at).is_some_and(|byte| signs.contains(byte));
    let signs = sign(4, b"-") && sign(7, b"-") && sign(10, b"Tt ") && sign(13, b":") && sign(16, b":");
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days_of = |month: u64| match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    // A leap second is the one before it.
    let in_range =
        (1..=12).contains(&month) && (1..=days_of(month)).contains(&day) && hour < 24 && minute < 60;
    if !signs || !in_range || second > 60 || year < 1970 {
        return None;
    }
    let leaps = |before: u64| (before - 1) / 4 - (before - 1) / 100 + (before - 1) / 400;
    let days =
        (year - 1970) * 365 + leaps(year) - leaps(1970) + (1..month).map(days_of).sum::<u64>() + day - 1;
    let seconds = days * 86_400 + hour * 3_600 + minute * 60 + second.min(59);
    let zone_at = 19 + text[19..].find(|c: char| c != '.' && !c.is_ascii_digit())?;
    let fraction = match &text[19..zone_at] {
        "" => 0.0,
        fraction if fraction.len() > 1 && fraction.starts_with('.') => format!("0{fraction}").parse().ok()?,
        _ => return None,
    };
    let utc = match &text[zone_at..] {
        "Z" | "z" => seconds,
        zone if zone.len() == 6 && sign(zone_at, b"+-") && sign(zone_at + 3, b":") => {
            let (hours, minutes) = (number(zone_at + 1, zone_at + 3)?, number(zone_at + 4, zone_at + 6)?);
            let offset = hours * 3_600 + minutes * 60;
            let east = zone.starts_with('+');
            let inside = (hours < 24 && minutes < 60).then_some(offset)?;
            if east { seconds.checked_sub(inside)? } else { seconds + inside }
        }
        _ => return None,
    };
    UNIX_EPOCH.checked_add(Duration::from_secs(utc) + Duration::from_secs_f64(fraction))
}

/// A moment in milliseconds since 1970.
pub(crate) fn since_1970(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64
}

/// Reads by how much a backoff grows, in thousandths: 1 to 100, three decimals.
pub(crate) fn factor(text: &str) -> Result<u32, String> {
    let wrong =
        || format!("{text:?} is no factor; write a number from 1 to 100, with at most three decimals");
    let number: f64 = text.parse().map_err(|_| wrong())?;
    let thousandths = number * 1e3;
    if !(1e3..=1e5).contains(&thousandths) || (thousandths - thousandths.round()).abs() > 1e-6 {
        return Err(wrong());
    }
    Ok(thousandths.round() as u32)
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

/// Duration classes, shortest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Classes(pub(crate) Vec<ClassLimit>);

/// Reads duration classes: `3s:all,10s:8,30s:25%`; or `none`. Whether they go together is for the server to say.
pub(crate) fn classes(text: &str) -> Result<Classes, String> {
    if text == "none" {
        return Ok(Classes(Vec::new()));
    }
    let class = |class: &str| {
        let (time, limit) = class.trim().split_once(':').ok_or_else(|| {
            format!("{class:?} is no class; write a duration and its limit: 3s:all,10s:8,30s:25%, or none")
        })?;
        let limit: Limit = limit.trim().parse()?;
        Ok::<_, String>(ClassLimit { duration_ms: duration(time.trim())?.as_millis() as u64, limit })
    };
    text.split(',').map(class).collect::<Result<_, _>>().map(Classes)
}

/// Reads how many tasks of a key may run at once; 0 is `none`.
pub(crate) fn limit(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is no limit; write how many may run at once, 1 or more, or none");
    match text {
        "none" => Ok(0),
        number => number.parse().ok().filter(|limit| *limit > 0).ok_or_else(wrong),
    }
}

/// Reads a rate: `100/s`, `30/m`, `5cost/s`, with a burst `100/s:burst=200`; `none` is 0 a second.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    let wrong = || {
        format!(
            "{text:?} is no rate; write 100/s, 30/m, 5cost/s or 100/s:burst=200, at least 0.001/s; or none"
        )
    };
    if text == "none" {
        return Ok(Rate { per_second: 0.0, burst: None, unit: None });
    }
    let (speed, burst) = match text.split_once(":burst=") {
        Some((speed, burst)) => (speed, Some(burst)),
        None => (text, None),
    };
    let (amount, seconds) = match speed.rsplit_once('/') {
        Some((amount, "s")) => (amount, 1.0),
        Some((amount, "m")) => (amount, 60.0),
        _ => return Err(wrong()),
    };
    let (amount, unit) = match amount.strip_suffix("cost") {
        Some(amount) => (amount, RateUnit::Cost),
        None => (amount, RateUnit::Tasks),
    };
    // Thousandths, as they are kept: a part of a minute is rounded to them.
    let number = |text: &str, over: f64| {
        let number: f64 = text.trim().parse().ok()?;
        let rounded = (number / over * 1e3).round() / 1e3;
        (rounded.is_finite() && rounded > 0.0).then_some(rounded)
    };
    let per_second = number(amount, seconds).ok_or_else(wrong)?;
    let burst = burst.map(|burst| number(burst, 1.0).ok_or_else(wrong)).transpose()?;
    Ok(Rate { per_second, burst, unit: Some(unit) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_read_and_a_wrong_one_says_what_to_write() {
        let class = |duration_ms, limit| ClassLimit { duration_ms, limit };
        let three =
            [class(3_000, Limit::All), class(10_000, Limit::Slots(8)), class(30_000, Limit::Percent(25))];
        assert_eq!(classes("3s:all,10s:8,30s:25%"), Ok(Classes(three.into())));
        assert_eq!(classes("3s:all, 10s:8, 30s:25%"), Ok(Classes(three.into())));
        assert_eq!(classes("none"), Ok(Classes(Vec::new())));
        for (wrong, says) in [
            ("", "is no class; write a duration and its limit"),
            ("3s", "\"3s\" is no class"),
            ("3s:all,", "is no class"),
            ("3:all", "\"3\" is no duration; write 250ms, 3s"),
            (
                "3s:some",
                "\"some\" is no limit; use all, a number of slots such as 8, or a percentage such as 25%",
            ),
            ("3s:-1", "\"-1\" is no limit"),
            ("3s:300%", "\"300%\" is no limit"),
        ] {
            let said = classes(wrong).unwrap_err();
            assert!(said.contains(says), "{wrong}: {said}");
        }
    }

    #[test]
    fn limits_and_rates_are_read() {
        assert_eq!([limit("4"), limit("none")], [Ok(4), Ok(0)]);
        for wrong in ["", "0", "-1", "4.5", "all"] {
            assert!(limit(wrong).unwrap_err().contains("1 or more, or none"), "{wrong:?}");
        }
        let read = |text: &str| rate(text).map(|rate| (rate.per_second, rate.burst, rate.unit));
        assert_eq!(read("100/s"), Ok((100.0, None, Some(RateUnit::Tasks))));
        assert_eq!(read("0.5/s:burst=3"), Ok((0.5, Some(3.0), Some(RateUnit::Tasks))));
        assert_eq!(read("30/m"), Ok((0.5, None, Some(RateUnit::Tasks))));
        assert_eq!(read("5cost/s:burst=60"), Ok((5.0, Some(60.0), Some(RateUnit::Cost))));
        assert_eq!(read("none"), Ok((0.0, None, None)));
        for wrong in
            ["", "100", "100/h", "/s", "x/s", "0/s", "-1/s", "0.0001/s", "1/s:burst", "1/s:burst=", "nan/s"]
        {
            assert!(rate(wrong).unwrap_err().contains("write 100/s"), "{wrong:?}");
        }
    }

    #[test]
    fn durations_weights_and_queues_are_read() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("1.5s"), Ok(Duration::from_millis(1_500)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7_200)));
        for wrong in ["", "3", "s", "-3s", "3 s", "3w", "1e99d", "0s", "1..2s"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
        for zero in ["0", "0s", "0ms", "0d"] {
            assert_eq!(duration_or_zero(zero), Ok(Duration::ZERO), "{zero}");
        }
        assert_eq!(duration_or_zero("10s"), Ok(Duration::from_secs(10)));
        for wrong in ["", "00", "0w", "0 s", "-0s", "s"] {
            assert!(duration_or_zero(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!([factor("1"), factor("2.5"), factor("100")], [Ok(1_000), Ok(2_500), Ok(100_000)]);
        for wrong in ["", "0.9", "101", "2.0005", "nan", "x"] {
            assert!(factor(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(weight("2.5"), Ok(2_500));
        for wrong in ["", "0", "-1", "0.0001", "1.0005", "1001", "nan", "x"] {
            assert!(weight(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(queue("render=3"), Ok(("render".into(), 3_000)));
        assert_eq!(queue("render"), Ok(("render".into(), 1_000)));
        assert!(queue("a/b").is_err() && queue("=3").is_err() && queue("a=0").is_err());
    }

    #[test]
    fn times_are_read_as_the_standard_writes_them() {
        let ms = |text: &str| time(text).map(since_1970);
        assert_eq!(ms("1970-01-01T00:00:00Z"), Ok(0));
        assert_eq!(ms("2000-02-29T12:00:00z"), Ok(951_825_600_000));
        assert_eq!(ms("2026-11-16T09:30:00.25Z"), Ok(1_794_821_400_250));
        assert_eq!(ms("2026-11-16 10:30:00+01:00"), Ok(1_794_821_400_000));
        assert_eq!(ms("2026-11-16T04:00:00-05:30"), Ok(1_794_821_400_000));
        assert_eq!(ms("2100-03-01T00:00:00Z"), Ok(4_107_542_400_000));
        assert_eq!(ms("2016-12-31T23:59:60Z"), Ok(1_483_228_799_000));
        for wrong in [
            "",
            "now",
            "2026-11-16",
            "2026-11-16T09:30Z",
            "2026-11-16T09:30:00",
            "2026-13-16T09:30:00Z",
            "2026-02-29T09:30:00Z",
            "2026-11-31T09:30:00Z",
            "2026-11-16T24:00:00Z",
            "2026-11-16T09:60:00Z",
            "2026-11-16T09:30:61Z",
            "2026-11-16T09:30:00.Z",
            "2026-11-16T09:30:00.1.2Z",
            "2026-11-16T09:30:00+1:00",
            "2026-11-16T09:30:00+24:00",
            "2026-11-16T09:30:00Zx",
            "1969-12-31T23:59:59Z",
            "1970-01-01T00:00:00+01:00",
            "+026-11-16T09:30:00Z",
            "2026-11-16T09:30:0日Z",
        ] {
            assert!(time(wrong).is_err(), "{wrong:?}");
        }
        let hour_ago = since_1970(SystemTime::now()) - 3_600_000;
        let read = time_or_ago("1h").map(since_1970).unwrap_or_default();
        assert!((hour_ago..hour_ago + 60_000).contains(&read), "{read}");
        assert!(time_or_ago("2026-11-16T09:30:00Z").is_ok() && time_or_ago("yesterday").is_err());
    }
}
