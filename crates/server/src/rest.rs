//! REST: what clients ask over gRPC, in JSON. Nothing is decided here; each request becomes the same call as over
//! gRPC, and its answer becomes JSON. The routes and the OpenAPI document are one table, so neither can know a
//! path that the other does not.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, RawPathParams, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header, request};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router};
use bytes::Bytes;
use evenhand_api::rest::{
    CancelMany, Canceled, CanceledMany, Drained, Enqueue, Enqueued, ErrorBody, Event, GateOpened, GivenUp,
    QueueDetail, QueueSet, Queues, ReplayMany, Replayed, ReplayedMany, SetKey, SetQueue, Shorten, Shortened,
    State as TaskState, Status, Task, TaskRetry, Tasks, Workers, parse, weight, wrong,
};
use evenhand_api::{MESSAGE_BYTES, errors, v1};
use evenhand_core::Refusal;
use evenhand_core::names::ContentType;
use evenhand_core::refusal::Kind;
use evenhand_store::Store;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio_stream::StreamExt;
use utoipa::openapi::{Content, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoParams, IntoResponses, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::clients::{Attaching, Clients, Watching};
use crate::http::Held;
use crate::interactive::Session;
use crate::websocket;

/// How often a stream of events that has nothing to say shows that it is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// What gRPC serves, a watch that may come back, and a slot for an interactive task: the clients' service, whatever its store.
#[tonic::async_trait]
pub(crate) trait Served:
    v1::client_server::Client<WatchStream = Watching, AttachStream = Attaching>
{
    async fn watch_again(&self, request: v1::WatchRequest) -> Result<Option<Watching>, Refusal>;
    async fn open(&self, open: v1::AttachOpen) -> Result<Session, Refusal>;
}

#[tonic::async_trait]
impl<S: Store + Clone + 'static> Served for Clients<S> {
    async fn watch_again(&self, request: v1::WatchRequest) -> Result<Option<Watching>, Refusal> {
        self.watch(request, true).await
    }

    async fn open(&self, open: v1::AttachOpen) -> Result<Session, Refusal> {
        self.interactive(open).await
    }
}

type Service = State<Arc<dyn Served>>;

/// The document's own words. Paths and types come from the handlers.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Evenhand",
        description = "A durable, fair task queue and scheduler. A task that was accepted is on disk and runs, \
                       at most once at a time; keys that wait share the workers by their weights."
    ),
    tags(
        (name = "tasks", description = "Submit tasks, look at them, watch and cancel them, run them again"),
        (name = "queues", description = "How queues and their keys stand, and how they treat their tasks"),
        (name = "server", description = "The server and its workers")
    ),
    components(schemas(ErrorBody, Event))
)]
struct Document;

/// The routes, with their document.
pub(crate) fn router(clients: Arc<dyn Served>) -> Router {
    let (router, document) = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(enqueue))
        .routes(routes!(enqueue_raw))
        .routes(routes!(list))
        .routes(routes!(get, cancel, shorten))
        .routes(routes!(cancel_many))
        .routes(routes!(replay))
        .routes(routes!(replay_many))
        .routes(routes!(payload))
        .routes(routes!(file))
        .routes(routes!(interactive))
        .routes(routes!(result))
        .routes(routes!(task_events))
        .routes(routes!(events))
        .routes(routes!(queues))
        .routes(routes!(queue, set_queue))
        .routes(routes!(set_key))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(workers))
        .routes(routes!(drain_worker))
        .routes(routes!(give_up_worker))
        .routes(routes!(status))
        .routes(routes!(open_gate))
        .split_for_parts();
    let document = Bytes::from(serde_json::to_vec_pretty(&refined(&document)).unwrap_or_default());
    let page = move || {
        let json = HeaderValue::from_static(ContentType::JSON);
        std::future::ready(([(header::CONTENT_TYPE, json)], document.clone()))
    };
    router
        .route("/v1/openapi.json", axum::routing::get(page))
        .method_not_allowed_fallback(not_allowed)
        .layer(DefaultBodyLimit::max(MESSAGE_BYTES))
        .with_state(clients)
}

/// The document, with what the types cannot say: a task has one payload and one time to start, a unique key's window
/// goes with a key, and a filter that changes tasks names a queue or a key.
fn refined(document: &utoipa::openapi::OpenApi) -> serde_json::Value {
    let mut document = serde_json::to_value(document).unwrap_or_default();
    let twice = |a: &str, b: &str| serde_json::json!({ "required": [a, b] });
    let number = |field: &str| serde_json::json!({ "required": [field], "properties": { (field): { "type": "number" } } });
    let text = |field: &str| {
        let text = serde_json::json!({ "type": "string", "minLength": 1 });
        serde_json::json!({ "required": [field], "properties": { (field): text } })
    };
    let wrong = [
        twice("payload", "text"),
        twice("payload", "base64"),
        twice("text", "base64"),
        serde_json::json!({ "allOf": [number("delay_ms"), number("run_at_ms")] }),
        serde_json::json!({ "allOf": [number("unique_ms"), { "not": text("unique_key") }] }),
    ];
    let schemas = &mut document["components"]["schemas"];
    schemas["NewTask"]["not"] = serde_json::json!({ "anyOf": wrong });
    schemas["File"]["not"] = twice("text", "base64");
    for filter in ["CancelMany", "ReplayMany"] {
        schemas[filter]["anyOf"] = serde_json::json!([text("queue"), text("key")]);
    }
    document
}

/// A refusal, as HTTP says it.
#[derive(Debug)]
pub(crate) struct Problem(Refusal);

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Problem {
        Problem(refusal)
    }
}

impl From<tonic::Status> for Problem {
    fn from(status: tonic::Status) -> Problem {
        Problem(errors::refusal(&status))
    }
}

impl Problem {
    fn with(self, status: StatusCode) -> Response {
        let mut response = (status, Json(ErrorBody::from(&self.0))).into_response();
        if let Some(ms) = self.0.retry_after_ms {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000)));
        }
        response
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(errors::row(self.0.kind).http);
        self.with(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR))
    }
}

/// Every kind of error may come back from everywhere.
impl IntoResponses for Problem {
    fn responses() -> BTreeMap<String, RefOr<utoipa::openapi::Response>> {
        let response = |row: errors::Row| {
            let response = ResponseBuilder::new()
                .description(row.kind.advice())
                .content("application/json", Content::new(Some(Ref::from_schema_name("ErrorBody"))));
            (row.http.to_string(), RefOr::T(response.build()))
        };
        errors::TABLE.into_iter().map(response).collect()
    }
}

type Answer<T> = Result<Json<T>, Problem>;

/// A name in the path, decoded.
struct Named(String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, Problem> {
        // The name of the one parameter, for the error.
        let field = match RawPathParams::from_request_parts(parts, state).await {
            Ok(params) => params.iter().next().map_or_else(String::new, |(name, _)| name.to_string()),
            Err(_) => "path".into(),
        };
        let named = Path::<String>::from_request_parts(parts, state).await;
        named
            .map(|Path(name)| Named(name))
            .map_err(|_| Refusal::invalid(field, "is not UTF-8, or percent-encoded in a wrong way").into())
    }
}

/// A task and one of its files in the path, decoded.
struct NamedFile(String, String);

impl<S: Send + Sync> FromRequestParts<S> for NamedFile {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, Problem> {
        let named = Path::<(String, String)>::from_request_parts(parts, state).await;
        named
            .map(|Path((id, name))| NamedFile(id, name))
            .map_err(|_| Refusal::invalid("path", "is not UTF-8, or percent-encoded in a wrong way").into())
    }
}

/// What stands behind the question mark.
struct Asked<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or_default();
        let fields = serde_urlencoded::Deserializer::new(form_urlencoded::parse(query.as_bytes()));
        serde_path_to_error::deserialize(fields).map(Asked).map_err(|error| wrong(&error).into())
    }
}

/// A body that could be read as a whole.
struct Whole(Bytes);

impl<S: Send + Sync> FromRequest<S> for Whole {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING)
            && encoding != "identity"
        {
            return Err(Refusal::invalid("content-encoding", "is not known; send the body as it is").into());
        }
        Bytes::from_request(request, state).await.map(Whole).map_err(|rejection| {
            match rejection.status() {
                StatusCode::PAYLOAD_TOO_LARGE => {
                    let most = format!("is too large; send at most {MESSAGE_BYTES} bytes in one request");
                    Refusal::too_large("body", most)
                }
                _ => Refusal::invalid("body", format!("could not be read: {}", rejection.body_text())),
            }
            .into()
        })
    }
}

// --- tasks ---

/// Submit tasks
///
/// All of them are accepted, or none. When it answers, they are on disk.
#[utoipa::path(
    post,
    path = "/v1/queues/{queue}/tasks",
    tag = "tasks",
    params(QueuePath),
    request_body(content = Enqueue),
    responses((status = 200, description = "Accepted", body = Enqueued), Problem)
)]
async fn enqueue(
    State(clients): Service,
    Named(queue): Named,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Answer<Enqueued> {
    if !is_json(&headers)? {
        let advice =
            "must be application/json here; a payload of another kind goes to /v1/queues/QUEUE/tasks/raw";
        return Err(Refusal::invalid("content-type", advice).into());
    }
    let request = parse::<Enqueue>(&body)?.to_wire(queue)?;
    let answer = clients.enqueue(tonic::Request::new(request)).await?;
    Ok(Json(answer.into_inner().into()))
}

/// Whether the body is JSON. Not only for order: a browser may send a form, but not JSON, from any page to any
/// server.
fn is_json(headers: &HeaderMap) -> Result<bool, Refusal> {
    let kind = content_type(headers)?;
    Ok(kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case(ContentType::JSON)))
}

/// Reads a body that must be JSON.
fn read_json<T: DeserializeOwned>(headers: &HeaderMap, body: &[u8]) -> Result<T, Refusal> {
    match is_json(headers)? {
        true => parse(body),
        false => Err(Refusal::invalid("content-type", "must be application/json here")),
    }
}

/// A task whose payload is the whole body.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RawTask {
    /// Whom to charge.
    #[param(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    key: Option<String>,
    /// The key's weight from now on.
    #[param(minimum = 0.001, maximum = 1000, multiple_of = 0.001)]
    weight: Option<f64>,
    /// 0 (first) to 9; 5 if nobody says.
    #[param(maximum = 9)]
    priority: Option<u32>,
    /// How often it is tried in all; its queue decides if nobody says.
    #[param(minimum = 1, maximum = 1000)]
    max_attempts: Option<u32>,
    /// How long it waits before the second try.
    #[param(maximum = 2_592_000_000_u64)]
    backoff_ms: Option<u64>,
    /// How many times as long each next wait is.
    #[param(minimum = 1, maximum = 100, multiple_of = 0.001)]
    factor: Option<f64>,
    /// How long a wait is at most.
    #[param(maximum = 2_592_000_000_u64)]
    max_backoff_ms: Option<u64>,
    /// How long one run may take.
    #[param(minimum = 1, maximum = 31_536_000_000_u64)]
    max_duration_ms: Option<u64>,
    /// How long a run of it takes, as far as you know. What it is charged where its queue shares time.
    #[param(minimum = 1, maximum = 1_000_000_000)]
    expected_ms: Option<u64>,
    /// It may start after so long.
    #[param(maximum = 315_360_000_000_u64)]
    delay_ms: Option<u64>,
    /// It may start at this time, in milliseconds since 1970; the past is now. Not with `delay_ms`.
    #[param(maximum = 253_402_300_799_999_u64)]
    run_at_ms: Option<u64>,
    /// It is too late to start it after so long.
    #[param(minimum = 1, maximum = 315_360_000_000_u64)]
    expires_ms: Option<u64>,
    /// It is canceled when nobody has watched it for so long.
    #[param(minimum = 1_000, maximum = 86_400_000)]
    attach_ttl_ms: Option<u64>,
    /// The same again in the same queue within `unique_ms` is the same task.
    #[param(max_length = 256)]
    unique_key: Option<String>,
    /// How long `unique_key` counts; a day if nobody says.
    #[param(minimum = 1, maximum = 2_592_000_000_u64)]
    unique_ms: Option<u64>,
    /// Chosen by the caller: the same id again within ten minutes is the same request.
    #[param(max_length = 128)]
    request_id: Option<String>,
}

/// Submit one task, with the body as its payload
///
/// Whatever the body is; its content type is kept with it.
#[utoipa::path(
    post,
    path = "/v1/queues/{queue}/tasks/raw",
    tag = "tasks",
    params(QueuePath, RawTask),
    request_body(content = Option<Vec<u8>>, content_type = "application/octet-stream"),
    responses((status = 200, description = "Accepted", body = Enqueued), Problem)
)]
async fn enqueue_raw(
    State(clients): Service,
    Named(queue): Named,
    Asked(task): Asked<RawTask>,
    headers: HeaderMap,
    Whole(payload): Whole,
) -> Answer<Enqueued> {
    same_origin(&headers)?;
    let RawTask { max_attempts, backoff_ms, factor, max_backoff_ms, .. } = task;
    let new = v1::NewTask {
        payload,
        key: task.key.unwrap_or_default(),
        weight_thousandths: task.weight.map(weight).transpose()?,
        priority: task.priority,
        retry: Some(TaskRetry { max_attempts, backoff_ms, factor, max_backoff_ms }.to_wire()?),
        max_duration_ms: task.max_duration_ms,
        expected_ms: task.expected_ms,
        content_type: content_type(&headers)?,
        delay_ms: task.delay_ms,
        run_at_ms: task.run_at_ms,
        expires_ms: task.expires_ms,
        attach_ttl_ms: task.attach_ttl_ms,
        unique_key: task.unique_key.unwrap_or_default(),
        unique_ms: task.unique_ms,
        files: Vec::new(),
    };
    let request_id = task.request_id.unwrap_or_default();
    let request = v1::EnqueueRequest { queue, tasks: vec![new], request_id };
    let answer = clients.enqueue(tonic::Request::new(request)).await?;
    Ok(Json(answer.into_inner().into()))
}

/// What the body is, if somebody says.
fn content_type(headers: &HeaderMap) -> Result<String, Refusal> {
    let Some(said) = headers.get(header::CONTENT_TYPE) else { return Ok(String::new()) };
    let text = said.to_str().map_err(|_| Refusal::invalid("content-type", "is no text"))?;
    Ok(text.trim().to_string())
}

/// A page of another site, open in a browser beside the server, must not be able to submit tasks or change others.
fn same_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let from =
        origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host.as_bytes());
    match from == headers.get(header::HOST).map(HeaderValue::as_bytes) {
        true => Ok(()),
        false => Err(Refusal::invalid("origin", "is another site's; it may change nothing here")),
    }
}

/// A queue in the path.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it says in the document what `Named` reads")]
struct QueuePath {
    /// The queue; made if it is new and a task comes.
    #[param(max_length = 64, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$", example = "render")]
    queue: String,
}

/// A task in the path.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it says in the document what `Named` reads")]
struct TaskPath {
    /// The task's id.
    #[param(pattern = "^[0-9]{1,9}-[0-9]{1,19}$", example = "0-42")]
    id: String,
}

/// A file of it.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it says in the document what `NamedFile` reads")]
struct FilePath {
    /// The file's name.
    #[param(
        min_length = 1,
        max_length = 128,
        pattern = r"^(?!\.{1,2}$)[^/\x00-\x1f\x7f-\x9f]+$",
        example = "page.html"
    )]
    name: String,
}

/// Which tasks.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Filter {
    /// Of this queue only.
    #[param(max_length = 64, pattern = "^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
    queue: Option<String>,
    /// Of this key only.
    #[param(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    key: Option<String>,
    /// In this state only.
    #[param(inline)]
    state: Option<TaskState>,
    /// Accepted at this time or later, in milliseconds since 1970.
    #[param(maximum = 253_402_300_799_999_u64)]
    accepted_from_ms: Option<u64>,
    /// Accepted before this time, in milliseconds since 1970.
    #[param(maximum = 253_402_300_799_999_u64)]
    accepted_before_ms: Option<u64>,
    /// Where the last page ended.
    #[param(pattern = "^([0-9]{1,9}-[0-9]{1,18})?$")]
    cursor: Option<String>,
    /// 1 to 1000; 100 if nobody says.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// List tasks: those that have not ended, and those whose end is remembered
///
/// Without their results and their tries.
#[utoipa::path(
    get, path = "/v1/tasks", tag = "tasks", params(Filter),
    responses((status = 200, description = "A page", body = Tasks), Problem)
)]
async fn list(State(clients): Service, Asked(filter): Asked<Filter>) -> Answer<Tasks> {
    let request = v1::ListRequest {
        queue: filter.queue.unwrap_or_default(),
        cursor: filter.cursor.unwrap_or_default(),
        limit: filter.limit,
        key: filter.key.unwrap_or_default(),
        state: filter.state.map_or(v1::TaskState::Unspecified, TaskState::to_wire).into(),
        accepted_from_ms: filter.accepted_from_ms,
        accepted_before_ms: filter.accepted_before_ms,
    };
    let page = clients.list(tonic::Request::new(request)).await?;
    Ok(Json(page.into_inner().into()))
}

/// Show how a task stands
#[utoipa::path(
    get, path = "/v1/tasks/{id}", tag = "tasks",
    params(TaskPath),
    responses((status = 200, description = "The task", body = Task), Problem)
)]
async fn get(State(clients): Service, Named(id): Named) -> Answer<Task> {
    let task = clients.get(tonic::Request::new(v1::GetRequest { id })).await?;
    Ok(Json(task.into_inner().into()))
}

/// Cancel a task
#[utoipa::path(
    delete, path = "/v1/tasks/{id}", tag = "tasks",
    params(TaskPath),
    responses((status = 200, description = "It will not run (any more)", body = Canceled), Problem)
)]
async fn cancel(State(clients): Service, Named(id): Named) -> Answer<Canceled> {
    let canceled = clients.cancel(tonic::Request::new(v1::CancelRequest { id })).await?;
    Ok(Json(Canceled { stopping: canceled.into_inner().stopping }))
}

/// Give a task less time
///
/// Whether it waits or runs. Never more: whoever wants that submits another task. A run that has taken longer already is
/// stopped.
#[utoipa::path(
    patch, path = "/v1/tasks/{id}", tag = "tasks",
    params(TaskPath),
    request_body(content = Shorten),
    responses((status = 200, description = "What it has now", body = Shortened), Problem)
)]
async fn shorten(
    State(clients): Service,
    Named(id): Named,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Answer<Shortened> {
    let Shorten { max_duration_ms } = read_json(&headers, &body)?;
    let done = clients.shorten(tonic::Request::new(v1::ShortenRequest { id, max_duration_ms })).await?;
    Ok(Json(Shortened { max_duration_ms: done.into_inner().max_duration_ms }))
}

/// Cancel all tasks of a filter
///
/// A bounded number at a time: call again with the `cursor` until there is none. Tasks that were accepted after the
/// first call are left alone.
#[utoipa::path(
    post, path = "/v1/tasks/cancel", tag = "tasks",
    request_body(content = CancelMany),
    responses((status = 200, description = "What was done", body = CanceledMany), Problem)
)]
async fn cancel_many(
    State(clients): Service,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Answer<CanceledMany> {
    let many: CancelMany = read_json(&headers, &body)?;
    let done = clients.cancel_many(tonic::Request::new(many.into())).await?;
    Ok(Json(done.into_inner().into()))
}

/// Run an ended task again
///
/// As another task, with the same payload and files.
#[utoipa::path(
    post, path = "/v1/tasks/{id}/replay", tag = "tasks",
    params(TaskPath),
    responses((status = 200, description = "The new task", body = Replayed), Problem)
)]
async fn replay(State(clients): Service, Named(id): Named, headers: HeaderMap) -> Answer<Replayed> {
    same_origin(&headers)?;
    let again = clients.replay(tonic::Request::new(v1::ReplayRequest { id })).await?;
    Ok(Json(Replayed { id: again.into_inner().id }))
}

/// Run all ended tasks of a filter again
///
/// Those that were not run again yet, a bounded number at a time: call again with the `cursor` until there is none.
#[utoipa::path(
    post, path = "/v1/tasks/replay", tag = "tasks",
    request_body(content = ReplayMany),
    responses((status = 200, description = "What was done", body = ReplayedMany), Problem)
)]
async fn replay_many(
    State(clients): Service,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Answer<ReplayedMany> {
    let many: ReplayMany = read_json(&headers, &body)?;
    let done = clients.replay_many(tonic::Request::new(many.into())).await?;
    Ok(Json(done.into_inner().into()))
}

/// Bytes with their content type, not to be run by a browser.
fn bytes(bytes: Bytes, content_type: &str) -> Response {
    let plain = HeaderValue::from_static("application/octet-stream");
    let content_type = HeaderValue::from_str(content_type).ok().filter(|value| !value.is_empty());
    let mut response = Response::new(Body::from(bytes));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, content_type.unwrap_or(plain));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox"));
    response
}

/// Get what a task was submitted with
///
/// With the content type that it was submitted with; application/octet-stream if nobody said. As long as it is
/// remembered.
#[utoipa::path(
    get, path = "/v1/tasks/{id}/payload", tag = "tasks",
    params(TaskPath),
    responses((status = 200, description = "The payload, whatever it is", content((serde_json::Value = "*/*"))), Problem)
)]
async fn payload(State(clients): Service, Named(id): Named) -> Result<Response, Problem> {
    let answer = clients.payload(tonic::Request::new(v1::GetRequest { id })).await?.into_inner();
    Ok(bytes(answer.payload, &answer.content_type))
}

/// Get a file that a task was submitted with
///
/// As long as it is remembered.
#[utoipa::path(
    get, path = "/v1/tasks/{id}/files/{name}", tag = "tasks",
    params(TaskPath, FilePath),
    responses(
        (status = 200, description = "The file", content((Vec<u8> = "application/octet-stream"))),
        Problem
    )
)]
async fn file(State(clients): Service, NamedFile(id, name): NamedFile) -> Result<Response, Problem> {
    let file = clients.file(tonic::Request::new(v1::FileRequest { id, name })).await?.into_inner();
    Ok(bytes(file.content, ""))
}

/// Get the result of a task that has succeeded
#[utoipa::path(
    get, path = "/v1/tasks/{id}/result", tag = "tasks",
    params(TaskPath),
    responses(
        (status = 200, description = "What it said", content((Vec<u8> = "application/octet-stream"))),
        Problem
    )
)]
async fn result(State(clients): Service, Named(id): Named) -> Result<Response, Problem> {
    let task = clients.get(tonic::Request::new(v1::GetRequest { id })).await?.into_inner();
    let (state, id) = (TaskState::of(&task), task.id);
    let none = || {
        let message = format!("task {id} is {}, so it has no result", state.name());
        Refusal::new(Kind::Conflict, "", message)
    };
    Ok(bytes(task.result.ok_or_else(none)?, ""))
}

/// Watch a task
///
/// Server-sent events from how it stands now to its end: `queued`, `scheduled`, `started`, `cut` (its run has less time than
/// at its start), `output`, `progress`, `dropped`, `finished`, and `estimate` while it waits (when it will start, whenever that
/// has changed; it has no id); the data of each is an Event as JSON. With `Last-Event-ID` it goes on after that event, or says
/// `missed` if what came since is not known any more; 204 if the task has ended and all was said.
#[utoipa::path(
    get, path = "/v1/tasks/{id}/events", tag = "tasks",
    params(
        TaskPath,
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that was seen")
    ),
    responses(
        (status = 200, description = "Events", content((String = "text/event-stream"))),
        (status = 204, description = "It has ended, and nothing is left to say"),
        Problem
    )
)]
async fn task_events(
    State(clients): Service,
    Named(id): Named,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    if id.is_empty() {
        return Err(Refusal::invalid("id", "is empty").into());
    }
    stream(&*clients, v1::WatchRequest { id, ..after(&headers) }).await
}

/// What to watch.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct EventFilter {
    /// Tasks of this queue only.
    #[param(max_length = 64, pattern = "^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
    queue: Option<String>,
    /// Tasks of this key only.
    #[param(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    key: Option<String>,
}

/// Watch all tasks, or those of a queue or a key
///
/// Server-sent events from now on, as of one task, until the caller leaves. With `Last-Event-ID` it goes on after
/// that event, or says `missed` if what came since is not known any more.
#[utoipa::path(
    get, path = "/v1/events", tag = "tasks",
    params(
        EventFilter,
        ("Last-Event-ID" = Option<String>, Header, description = "The last event that was seen")
    ),
    responses(
        (status = 200, description = "Events", content((String = "text/event-stream"))),
        Problem
    )
)]
async fn events(
    State(clients): Service,
    Asked(filter): Asked<EventFilter>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let EventFilter { queue, key } = filter;
    let (queue, key) = (queue.unwrap_or_default(), key.unwrap_or_default());
    stream(&*clients, v1::WatchRequest { queue, key, ..after(&headers) }).await
}

fn after(headers: &HeaderMap) -> v1::WatchRequest {
    let after = headers.get("last-event-id").and_then(|id| id.to_str().ok()).unwrap_or_default();
    v1::WatchRequest { after: after.into(), ..v1::WatchRequest::default() }
}

async fn stream(clients: &dyn Served, request: v1::WatchRequest) -> Result<Response, Problem> {
    let Some(watching) = clients.watch_again(request).await? else {
        return Ok(StatusCode::NO_CONTENT.into_response());
    };
    let events = watching.filter_map(Result::ok).map(|event| {
        let id = event.id.clone();
        let (name, event) = Event::named(event);
        let said = SseEvent::default().event(name).data(serde_json::to_string(&event).unwrap_or_default());
        Ok::<_, Infallible>(if id.is_empty() { said } else { said.id(id) })
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE_EVERY)).into_response())
}

// --- interactive tasks ---

/// What somebody wants of an interactive task.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Ask {
    /// Whom to charge.
    #[param(max_length = 256, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$")]
    key: Option<String>,
    /// How long it may take.
    #[param(minimum = 1, maximum = 31_536_000_000_u64)]
    max_duration_ms: Option<u64>,
    /// Its command is to have a terminal.
    tty: Option<bool>,
    /// How many rows the terminal shows; 24 if nobody says.
    #[param(minimum = 1, maximum = 65_535)]
    rows: Option<u32>,
    /// How many columns; 80 if nobody says.
    #[param(minimum = 1, maximum = 65_535)]
    cols: Option<u32>,
    /// What the terminal understands: `TERM` of the command.
    #[param(max_length = 64, pattern = "^[!-~]*$")]
    term: Option<String>,
}

impl Ask {
    fn open(self, queue: String) -> Result<v1::AttachOpen, Refusal> {
        let Ask { key, max_duration_ms, tty, rows, cols, term } = self;
        let terminal = match tty {
            Some(true) => {
                let (rows, cols) = (rows.unwrap_or(24), cols.unwrap_or(80));
                evenhand_api::interactive::size(rows, cols)?;
                Some(v1::Terminal { rows, cols, term: term.unwrap_or_default() })
            }
            Some(false) | None => None,
        };
        Ok(v1::AttachOpen { queue, key: key.unwrap_or_default(), max_duration_ms, terminal })
    }
}

/// Talk to a worker's command, over a WebSocket
///
/// A worker of the queue runs its command now, or the request is refused now (429): an interactive task never waits. A
/// binary frame begins with a byte that says what follows: 0 standard input, 1 standard output, 2 standard error. A text
/// frame is JSON: `{"resize":{"rows":24,"cols":80}}` and `{"eof":true}` from the client, `{"accepted":..}` and
/// `{"warning":..}` from the server. The code that the socket is closed with says how it ended.
#[utoipa::path(
    get, path = "/v1/queues/{queue}/interactive", tag = "tasks",
    params(QueuePath, Ask),
    responses((status = 101, description = "The task has a slot; a WebSocket follows"), Problem)
)]
async fn interactive(
    State(clients): Service,
    Named(queue): Named,
    Asked(ask): Asked<Ask>,
    headers: HeaderMap,
    held: Option<Extension<Held>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Problem> {
    same_origin(&headers)?;
    let open = ask.open(queue)?;
    let upgrade = upgrade.map_err(|rejection| {
        Refusal::invalid("upgrade", format!("this is a WebSocket: {}", rejection.body_text()))
    })?;
    let session = clients.open(open).await?;
    let upgrade = upgrade
        .max_message_size(websocket::MESSAGE_BYTES)
        .max_frame_size(websocket::MESSAGE_BYTES)
        .write_buffer_size(0);
    Ok(upgrade.on_upgrade(move |socket| websocket::serve(socket, session, held)))
}

// --- queues, workers, the server ---

/// Show every queue
#[utoipa::path(
    get, path = "/v1/queues", tag = "queues",
    responses((status = 200, description = "The queues", body = Queues), Problem)
)]
async fn queues(State(clients): Service) -> Answer<Queues> {
    let queues = clients.queues(tonic::Request::new(v1::QueuesRequest {})).await?;
    Ok(Json(queues.into_inner().into()))
}

/// How many keys.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct Keys {
    /// Show at most so many keys, 1 to 1000; 20 if nobody says.
    #[param(minimum = 1, maximum = 1000)]
    keys: Option<u32>,
}

/// Show a queue, its settings, and the shares of its busiest keys
#[utoipa::path(
    get, path = "/v1/queues/{queue}", tag = "queues",
    params(QueuePath, Keys),
    responses((status = 200, description = "The queue", body = QueueDetail), Problem)
)]
async fn queue(
    State(clients): Service,
    Named(name): Named,
    Asked(Keys { keys }): Asked<Keys>,
) -> Answer<QueueDetail> {
    let queue = clients.queue(tonic::Request::new(v1::QueueRequest { name, keys })).await?;
    Ok(Json(queue.into_inner().into()))
}

/// Change a queue's settings
///
/// All that is named, or nothing; what is not named stays. With a `version`, only if nobody has changed them since
/// that was read: 409 otherwise. The queue is made if it is new.
#[utoipa::path(
    put, path = "/v1/queues/{queue}", tag = "queues",
    params(QueuePath),
    request_body(content = SetQueue),
    responses((status = 200, description = "The settings now", body = QueueSet), Problem)
)]
async fn set_queue(
    State(clients): Service,
    Named(name): Named,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Answer<QueueSet> {
    let request = read_json::<SetQueue>(&headers, &body)?.to_wire(name)?;
    let set = clients.set_queue(tonic::Request::new(request)).await?;
    Ok(Json(set.into_inner().into()))
}

/// Set a key's weight, its limit and its rate, pause it, or let it go on
///
/// What is not named stays. Tasks of a paused key wait, and what runs goes on; when it goes on, it gets its share
/// from then on, and not what it missed.
#[utoipa::path(
    put, path = "/v1/queues/{queue}/keys", tag = "queues",
    params(QueuePath),
    request_body(content = SetKey),
    responses((status = 204, description = "It is set"), Problem)
)]
async fn set_key(
    State(clients): Service,
    Named(name): Named,
    headers: HeaderMap,
    Whole(body): Whole,
) -> Result<StatusCode, Problem> {
    let request = read_json::<SetKey>(&headers, &body)?.to_wire(name)?;
    clients.set_key(tonic::Request::new(request)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Pause a queue
///
/// Nothing of it is started any more; what runs goes on, and tasks are accepted.
#[utoipa::path(
    post, path = "/v1/queues/{queue}/pause", tag = "queues",
    params(QueuePath),
    responses((status = 200, description = "The settings now", body = QueueSet), Problem)
)]
async fn pause(State(clients): Service, Named(name): Named, headers: HeaderMap) -> Answer<QueueSet> {
    set_paused(&*clients, name, &headers, true).await
}

/// Let a paused queue go on
#[utoipa::path(
    post, path = "/v1/queues/{queue}/resume", tag = "queues",
    params(QueuePath),
    responses((status = 200, description = "The settings now", body = QueueSet), Problem)
)]
async fn resume(State(clients): Service, Named(name): Named, headers: HeaderMap) -> Answer<QueueSet> {
    set_paused(&*clients, name, &headers, false).await
}

async fn set_paused(
    clients: &dyn Served,
    name: String,
    headers: &HeaderMap,
    paused: bool,
) -> Answer<QueueSet> {
    same_origin(headers)?;
    let settings = Some(v1::QueueSettings { paused: Some(paused), ..v1::QueueSettings::default() });
    let request = v1::SetQueueRequest { name, settings, version: None };
    let set = clients.set_queue(tonic::Request::new(request)).await?;
    Ok(Json(set.into_inner().into()))
}

/// Show the workers
#[utoipa::path(
    get, path = "/v1/workers", tag = "server",
    responses((status = 200, description = "The workers", body = Workers), Problem)
)]
async fn workers(State(clients): Service) -> Answer<Workers> {
    let workers = clients.workers(tonic::Request::new(v1::WorkersRequest {})).await?;
    Ok(Json(workers.into_inner().into()))
}

/// Show the server: its store, its start gate, its thresholds
#[utoipa::path(
    get, path = "/v1/status", tag = "server",
    responses((status = 200, description = "The server", body = Status), Problem)
)]
async fn status(State(clients): Service) -> Answer<Status> {
    let status = clients.status(tonic::Request::new(v1::StatusRequest {})).await?;
    Ok(Json(status.into_inner().into()))
}

/// A worker in the path.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "it says in the document what `Named` reads")]
struct SeatPath {
    /// The worker's seat.
    #[param(max_length = 64, pattern = "^[A-Za-z0-9][A-Za-z0-9._-]*$", example = "gpu-7")]
    seat: String,
}

/// Ask a worker to drain
///
/// It takes no more work, and ends when what it runs has ended. One that is not connected is told when it is back.
#[utoipa::path(
    post, path = "/v1/workers/{seat}/drain", tag = "server",
    params(SeatPath),
    responses((status = 200, description = "It drains", body = Drained), Problem)
)]
async fn drain_worker(State(clients): Service, Named(seat): Named, headers: HeaderMap) -> Answer<Drained> {
    same_origin(&headers)?;
    let drained = clients.drain_worker(tonic::Request::new(v1::DrainWorkerRequest { seat })).await?;
    Ok(Json(drained.into_inner().into()))
}

/// Give a worker up
///
/// For whoever knows that its machine is dead: it counts as dead with all that it ran, and its tasks are tried again at
/// once. If it is alive, they run twice at once. One that is connected and healthy is not given up: 409.
#[utoipa::path(
    post, path = "/v1/workers/{seat}/give-up", tag = "server",
    params(SeatPath),
    responses((status = 200, description = "It is given up", body = GivenUp), Problem)
)]
async fn give_up_worker(State(clients): Service, Named(seat): Named, headers: HeaderMap) -> Answer<GivenUp> {
    same_origin(&headers)?;
    let given_up = clients.give_up_worker(tonic::Request::new(v1::GiveUpWorkerRequest { seat })).await?;
    Ok(Json(given_up.into_inner().into()))
}

/// Open the start gate by hand
///
/// The workers that it waits for count as dead. If one of them is alive, or one that an old copy of the store does not
/// know, what it runs is run twice at once.
#[utoipa::path(
    post, path = "/v1/gate/open", tag = "server",
    responses((status = 200, description = "It is open", body = GateOpened), Problem)
)]
async fn open_gate(State(clients): Service, headers: HeaderMap) -> Answer<GateOpened> {
    same_origin(&headers)?;
    let opened = clients.open_gate(tonic::Request::new(v1::OpenGateRequest {})).await?;
    Ok(Json(opened.into_inner().into()))
}

// --- what is not there ---

async fn not_allowed(method: Method) -> Response {
    let message = format!("{method} is not for this path; see /v1/openapi.json");
    Problem(Refusal::invalid("", message)).with(StatusCode::METHOD_NOT_ALLOWED)
}

/// For paths that nobody serves.
pub(crate) async fn not_found(uri: Uri, headers: HeaderMap) -> Response {
    let grpc = headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if grpc {
        return tonic::Status::unimplemented("this server does not know that call").into_http();
    }
    Problem(Refusal::not_found(format!("there is nothing at {}; see /v1/openapi.json", uri.path())))
        .into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_kind_of_error_is_what_the_table_says() {
        for row in errors::TABLE {
            let refusal = Refusal::new(row.kind, "tasks[3].weight", "must be positive").after(1_001);
            let response = Problem(refusal).into_response();
            assert_eq!(response.status().as_u16(), row.http);
            assert_eq!(response.headers()[header::RETRY_AFTER], "2");
            let body = axum::body::to_bytes(response.into_body(), 1_000).await.unwrap();
            let said: serde_json::Value = serde_json::from_slice(&body).unwrap();
            let expected = serde_json::json!({
                "kind": row.kind.name(),
                "message": "must be positive",
                "field": "tasks[3].weight",
                "retry_after_ms": 1_001,
            });
            assert_eq!(said["error"], expected);
        }
    }

    #[test]
    fn only_this_site_and_programs_may_submit_a_raw_payload() {
        let from = |origin: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static("127.0.0.1:7400"));
            if !origin.is_empty() {
                headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            }
            same_origin(&headers).is_ok()
        };
        assert!(from("") && from("http://127.0.0.1:7400"));
        for origin in ["http://127.0.0.1:7401", "https://example.com", "null", "127.0.0.1:7400"] {
            assert!(!from(origin), "{origin}");
        }
    }
}
