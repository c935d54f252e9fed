//! Opening a store: the schema is made once however many servers begin at once, and left alone by a program that is too
//! old for it; a connection is as safe as its address says.

use evenhand_core::names::ShardId;
use evenhand_store::postgres::{OpenError, Options};
use evenhand_store::{Postgres, Store};

use crate::cluster::{Cluster, SHARED, block_on, fresh_schema, open};

#[test]
fn servers_that_start_at_once_make_the_schema_once() {
    for _ in 0..15 {
        let schema = fresh_schema();
        let addresses = [SHARED.address(&schema), SHARED.pooled(&schema), SHARED.address(&schema)];
        let threads = addresses.map(|address| {
            std::thread::spawn(move || {
                block_on(async { open(&address).await.take(ShardId(1), None).await.unwrap().epoch })
            })
        });
        let mut epochs = threads.map(|thread| thread.join().unwrap().0);
        epochs.sort_unstable();
        assert_eq!(epochs, [1, 2, 3]);
        assert_eq!(SHARED.sql(&format!("SELECT count(*) FROM {schema}.versions")), "1");
    }
}

#[test]
fn a_schema_that_is_newer_is_refused_and_left_alone() {
    let schema = fresh_schema();
    block_on(open(&SHARED.address(&schema)));
    SHARED.sql(&format!("INSERT INTO {schema}.versions (version) VALUES (999)"));
    let refused = block_on(Postgres::open(&SHARED.address(&schema), Options::default())).unwrap_err();
    assert!(matches!(refused, OpenError::Newer { found: 999, .. }), "{refused}");
    assert!(refused.to_string().contains("use a newer one"), "{refused}");
}

#[test]
fn a_database_of_another_encoding_is_refused() {
    SHARED.sql("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0");
    let address = SHARED.address("evenhand").replace("/postgres?", "/latin?");
    let refused = block_on(Postgres::open(&address, Options::default())).unwrap_err();
    assert_eq!(refused, OpenError::Encoding { encoding: "LATIN1".into() });
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let address = "postgres://nobody@127.0.0.1:1/nowhere";
    let refused = block_on(Postgres::open(address, Options::default())).unwrap_err();
    assert!(matches!(refused, OpenError::Unreachable { .. }), "{refused}");
}

/// Whoever may not create anything can use what is there.
#[test]
fn an_owner_needs_no_more_than_the_tables() {
    let schema = fresh_schema();
    block_on(open(&SHARED.address(&schema)));
    SHARED.sql(&format!(
        "CREATE ROLE plain LOGIN; GRANT USAGE ON SCHEMA {schema} TO plain;
         GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO plain; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO plain"
    ));
    let address = SHARED.address(&schema).replace("evenhand@", "plain@");
    block_on(async {
        let store = open(&address).await;
        let taken = store.take(ShardId(1), None).await.unwrap();
        store.commit(ShardId(1), taken.epoch, crate::plan::changes(1)).await.unwrap();
    });
}

/// Encrypted if it can be; and to be sure of the server, its certificate must follow from one that is known.
#[test]
fn a_connection_is_as_safe_as_its_address_says() {
    let cluster = Cluster::start();
    let plain = cluster.address("evenhand");
    let with = |parameters: &str| format!("{plain}&{parameters}");
    let refused = |parameters: &str| match block_on(Postgres::open(&with(parameters), Options::default())) {
        Ok(_) => panic!("{parameters} was good enough"),
        Err(error) => error.to_string(),
    };
    let encrypted = |parameters: &str| {
        block_on(async {
            let _open = open(&with(&format!("application_name=safe&{parameters}"))).await;
            cluster.sql(
                "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'safe'",
            )
        })
    };
    assert_eq!(encrypted("sslmode=prefer"), "f");
    assert!(refused("sslmode=require").contains("TLS"));

    let root = cluster.secure();
    for good in ["", "sslmode=prefer", "sslmode=require"] {
        assert_eq!(encrypted(good), "t", "{good}");
    }
    assert_eq!(encrypted(&format!("sslmode=verify-full&sslrootcert={root}")), "t");
    assert_eq!(encrypted(&format!("sslmode=require&sslrootcert={root}")), "t");
    assert_eq!(encrypted("sslmode=disable"), "f");
    for doubtful in
        ["sslmode=verify-full".into(), format!("sslmode=require&sslrootcert={}", cluster.other_root())]
    {
        let error = refused(&doubtful);
        assert!(error.contains("certificate") || error.contains("sslrootcert"), "{doubtful}: {error}");
    }
    assert!(refused("sslmode=verify-full&sslrootcert=/nowhere").contains("/nowhere"));
}
