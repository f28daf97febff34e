// Groups for tests: all ranks in this process, one thread each, over loopback TCP.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "engine/collectives/direct_communicator.h"

namespace stretto::engine::testing {
// "a", "b", …
inline std::string RankName(int rank) { return std::string(1, static_cast<char>('a' + rank)); }

// Runs `body` for every rank with what joining a fresh group gave it, and waits for all. Catch2's
// assertions belong to one thread: bodies return what is to be checked, and the caller checks it.
// `options` are those of each rank.
template <class Result>
std::vector<Result> JoinRanks(
    int num_ranks, const std::function<Result(absl::StatusOr<std::unique_ptr<Communicator>>)>& body,
    const std::function<CommunicatorOptions(int rank)>& options) {
  auto listener = Listener::Open("127.0.0.1");
  STRETTO_CHECK(listener.ok());
  RendezvousHost host(*std::move(listener));
  std::vector<Result> results(num_ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) {
    threads.emplace_back([&, r] {
      auto group =
          JoinGroup(host.address(), {"g", 1, r, num_ranks, RankName(r), "127.0.0.1"}, options(r));
      results[r] = body(std::move(group));
    });
  }
  for (std::thread& t : threads) t.join();
  return results;
}

// The same for groups that are made without fail.
template <class Result>
std::vector<Result> RunRanks(int num_ranks, const std::function<Result(Communicator&)>& body,
                             const std::function<CommunicatorOptions(int rank)>& options) {
  return JoinRanks<Result>(
      num_ranks,
      [&body](absl::StatusOr<std::unique_ptr<Communicator>> group) {
        STRETTO_CHECK_MSG(group.ok(), std::string(group.status().message()).c_str());
        return body(**group);
      },
      options);
}
template <class Result>
std::vector<Result> RunRanks(int num_ranks, const std::function<Result(Communicator&)>& body,
                             const CommunicatorOptions& options = {}) {
  return RunRanks<Result>(num_ranks, body, [&options](int) { return options; });
}
}  // namespace stretto::engine::testing
