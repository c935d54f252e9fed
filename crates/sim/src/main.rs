//! t
fn main() {
    let n: u64 = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(100);
    let a: u64 = std::env::args().nth(2).and_then(|s| s.parse().ok()).unwrap_or(0);
    if a == 777 {
        for (c, t) in evenhand_sim::canaries::all() {
            match evenhand_sim::canaries::hunt(c, n) {
                Some(v) => println!("caught {t}: {} seed {} {}", v.world, v.seed, v.what),
                None => println!("SURVIVED {t}"),
            }
        }
        return;
    }
    let mut worst = evenhand_sim::Report::default();
    let mut bad = 0;
    for seed in a..a + n {
        match evenhand_sim::play(seed, None) {
            Ok(r) => worst.add(&r),
            Err(v) => {
                bad += 1;
                if bad < 12 {
                    println!("{v:?}");
                }
            }
        }
    }
    println!("worst {worst:?} bad {bad}");
}
