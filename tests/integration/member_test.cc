// How members keep to the coordinator's rules, seen from a coordinator that is told what to answer.
#include <catch2/catch.hpp>
#include <csignal>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "stretto/v1/coordinator.grpc.pb.h"
#include "tests/integration/client.h"
#include "tests/integration/test_run.h"

namespace stretto::testing {
namespace {
class FakeCoordinator final : public v1::Coordinator::Service {
 public:
  explicit FakeCoordinator(int port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
  }
  ~FakeCoordinator() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Register(grpc::ServerContext*, const v1::RegisterRequest* request,
                        v1::RegisterResponse* response) override {
    const std::lock_guard lock(mutex_);
    registered_ = *request;
    if (refuse_) return {grpc::StatusCode::FAILED_PRECONDITION, "another numeric profile"};
    response->set_run_id("run-1");
    response->set_member_epoch(++epoch_);
    response->set_heartbeat_interval_ms(30);
    response->set_lease_ms(300);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override {
    const std::lock_guard lock(mutex_);
    if (request->member_epoch() != epoch_) {
      return {grpc::StatusCode::FAILED_PRECONDITION, absl::StrCat("the epoch is ", epoch_)};
    }
    ++num_heartbeats_;
    peak_rss_bytes_ = request->peak_rss_bytes();
    notice_ = request->notice();
    response->set_run_ended(ended_);
    return grpc::Status::OK;
  }
  grpc::Status Leave(grpc::ServerContext*, const v1::LeaveRequest* request,
                     v1::LeaveResponse*) override {
    const std::lock_guard lock(mutex_);
    left_epoch_ = request->member_epoch();
    return grpc::Status::OK;
  }

  template <class T>
  T Get(T FakeCoordinator::*field) {
    const std::lock_guard lock(mutex_);
    return this->*field;
  }
  template <class T>
  void Set(T FakeCoordinator::*field, T value) {
    const std::lock_guard lock(mutex_);
    this->*field = value;
  }

  v1::RegisterRequest registered_;
  uint64_t epoch_ = 0, left_epoch_ = 0, peak_rss_bytes_ = 0;
  std::string notice_;
  int num_heartbeats_ = 0;
  bool refuse_ = false, ended_ = false;

 private:
  std::mutex mutex_;
  std::unique_ptr<grpc::Server> server_;
};

using Fake = FakeCoordinator;
}  // namespace

TEST_CASE("a member joins, keeps its lease, and leaves") {
  const TestRun run;
  const int port = FreePort();
  const auto flags = std::vector<std::string>{"--coordinator", absl::StrCat("127.0.0.1:", port)};
  auto coordinator = std::make_unique<FakeCoordinator>(port);
  Process generator = run.Start("generator", "generator-3", 0, flags);
  const std::string address = run.WaitForAddress(generator, "generator-3");
  REQUIRE(Eventually([&] { return coordinator->Get(&Fake::num_heartbeats_) > 2; }));
  const v1::RegisterRequest registered = coordinator->Get(&Fake::registered_);
  CHECK(registered.pool() == v1::POOL_GENERATOR);
  CHECK(registered.name() == "generator-3");
  CHECK(registered.address() == address);
  CHECK(registered.profile().backend() == "cpu");
  CHECK(registered.profile().dtype() == "bf16");
  CHECK(!registered.config_hash().empty());
  CHECK(registered.version().number() == 0);
  CHECK(registered.version().hash().size() == 32);
  CHECK(coordinator->Get(&Fake::peak_rss_bytes_) > 1000000);

  SECTION("work of an older epoch is refused, the current one is named") {
    auto stub = Connect<v1::Generator>(address);
    v1::GenerateRequest request = MakeGenerateRequest({1, 2, 3}, 1, 4);
    request.mutable_caller()->set_run_id("run-1");
    request.mutable_caller()->set_member_epoch(1);
    CHECK(Generate(*stub, request).status.ok());
    coordinator->Set<uint64_t>(&Fake::epoch_, 5);
    REQUIRE(Eventually([&] { return coordinator->Get(&Fake::epoch_) == 6; }));
    REQUIRE(Eventually([&] {
      request.mutable_caller()->set_member_epoch(6);
      return Generate(*stub, request).status.ok();
    }));
    request.mutable_caller()->set_member_epoch(1);
    const Generated old = Generate(*stub, request);
    CHECK(old.status.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
    CHECK(old.status.error_message().find("6") != std::string::npos);
    request.mutable_caller()->set_member_epoch(6);
    request.mutable_caller()->set_run_id("another run");
    CHECK(Generate(*stub, request).status.error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  }
  SECTION("drained by hand, it says so until it takes work again") {
    const auto stub = Connect<v1::Generator>(address);
    v1::DrainRequest request;
    v1::DrainResponse response;
    CallContext drain, end;
    REQUIRE(stub->Drain(&drain, request, &response).ok());
    CHECK(Eventually(
        [&] { return coordinator->Get(&Fake::notice_).find("is draining") != std::string::npos; }));
    request.set_end(true);
    REQUIRE(stub->Drain(&end, request, &response).ok());
    CHECK(Eventually([&] { return coordinator->Get(&Fake::notice_).empty(); }));
  }
  SECTION("a coordinator that comes back is joined again") {
    coordinator.reset();
    SleepMs(200);
    CHECK(generator.IsRunning());
    coordinator = std::make_unique<FakeCoordinator>(port);
    CHECK(Eventually([&] { return coordinator->Get(&Fake::num_heartbeats_) > 2; }));
    CHECK(coordinator->Get(&Fake::registered_).run_id() == "run-1");
  }
  SECTION("the run ends") {
    coordinator->Set(&Fake::ended_, true);
    CHECK(generator.WaitForExit(10000) == 0);
    CHECK(run.MemberField("generator-3", "address").empty());
  }
  SECTION("it is told to end") {
    generator.Signal(SIGINT);  // its parent's affair
    SleepMs(300);
    CHECK(generator.IsRunning());
    generator.Signal(SIGTERM);
    CHECK(generator.WaitForExit(10000) == 0);
    CHECK(coordinator->Get(&Fake::left_epoch_) == coordinator->Get(&Fake::epoch_));
  }
}

TEST_CASE("a service ends in order when its parent is killed") {
  const TestRun run;
  Process scorer = run.Start("scorer", "scorer-0");
  run.WaitForAddress(scorer, "scorer-0");
  scorer.Signal(SIGHUP);  // what the kernel sends then
  CHECK(scorer.WaitForExit(10000) == 0);
  CHECK(scorer.Log().find("stopped") != std::string::npos);
}

TEST_CASE("a member that is refused ends with the reason") {
  const TestRun run;
  const int port = FreePort();
  FakeCoordinator refusing(port);
  refusing.Set(&Fake::refuse_, true);
  Process scorer =
      run.Start("scorer", "scorer-0", 0, {"--coordinator", absl::StrCat("127.0.0.1:", port)});
  CHECK(scorer.WaitForExit(20000) == 1);
  CHECK(scorer.Log().find("another numeric profile") != std::string::npos);
}

TEST_CASE("a member without a coordinator waits for it") {
  const TestRun run;
  const int port = FreePort();
  Process scorer =
      run.Start("scorer", "scorer-0", 0, {"--coordinator", absl::StrCat("127.0.0.1:", port)});
  run.WaitForAddress(scorer, "scorer-0");
  SleepMs(300);
  CHECK(scorer.IsRunning());
  FakeCoordinator coordinator(port);
  CHECK(Eventually([&] { return coordinator.Get(&Fake::num_heartbeats_) > 0; }));
}
}  // namespace stretto::testing
