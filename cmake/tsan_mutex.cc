// absl::Mutex as ThreadSanitizer has to see it. Debian's library is built without the sanitizer, so
// what a lock orders would look like a race. In programs of the preset `tsan` these definitions
// come before the library's: they tell the sanitizer and call the library. It looks at conditions
// inside of these calls, in whichever thread holds the lock then, which the sanitizer is told to
// pass over.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdlib>
#include <cstring>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace {
thread_local int depth = 0;  // the library's functions call one another

// The library's definition of what `method`, a definition of this file, stands before.
template <class Function, class Method>
Function Find(Method method) {
  void* mine = nullptr;
  std::memcpy(&mine, &method, sizeof mine);
  Dl_info info;
  if (dladdr(mine, &info) == 0 || info.dli_sname == nullptr) std::abort();
  void* found = dlsym(RTLD_NEXT, info.dli_sname);
  if (found == nullptr) std::abort();
  return reinterpret_cast<Function>(found);
}
template <class Class, class Result, class... Args>
auto InLibrary(Result (Class::*method)(Args...)) {
  return Find<Result (*)(Class*, Args...)>(method);
}
template <class Class, class Result, class... Args>
auto InLibrary(Result (Class::*method)(Args...) const) {
  return Find<Result (*)(const Class*, Args...)>(method);
}

class Call {
 public:
  Call() { ++depth; }
  ~Call() { --depth; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  bool is_outer() const { return depth == 1; }
};

template <class Function>
void Acquire(absl::Mutex* mutex, unsigned flags, const Function& function) {
  const Call call;
  if (!call.is_outer()) return function();
  __tsan_mutex_pre_lock(mutex, flags);
  function();
  __tsan_mutex_post_lock(mutex, flags, /*recursion=*/0);
}

template <class Function>
bool TryToAcquire(absl::Mutex* mutex, unsigned flags, const Function& function) {
  const Call call;
  if (!call.is_outer()) return function();
  flags |= __tsan_mutex_try_lock;
  __tsan_mutex_pre_lock(mutex, flags);
  const bool is_held = function();
  __tsan_mutex_post_lock(mutex, is_held ? flags : flags | __tsan_mutex_try_lock_failed, 0);
  return is_held;
}

template <class Function>
void Release(absl::Mutex* mutex, unsigned flags, const Function& function) {
  const Call call;
  if (!call.is_outer()) return function();
  __tsan_mutex_pre_unlock(mutex, flags);
  function();
  __tsan_mutex_post_unlock(mutex, flags);
}

// Gives the lock away and has it again in the end.
template <class Function>
auto Wait(absl::Mutex* mutex, const Function& function) {
  const Call call;
  if (!call.is_outer()) return function();
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  __tsan_mutex_pre_lock(mutex, 0);
  struct Relocked {
    absl::Mutex* mutex;
    ~Relocked() { __tsan_mutex_post_lock(mutex, 0, /*recursion=*/0); }
  };
  const Relocked relocked{mutex};
  return function();
}
constexpr unsigned kReader = __tsan_mutex_read_lock;
}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN
void Mutex::Lock() {
  static const auto library = InLibrary(&Mutex::Lock);
  Acquire(this, 0, [this] { library(this); });
}
void Mutex::Unlock() {
  static const auto library = InLibrary(&Mutex::Unlock);
  Release(this, 0, [this] { library(this); });
}
bool Mutex::TryLock() {
  static const auto library = InLibrary(&Mutex::TryLock);
  return TryToAcquire(this, 0, [this] { return library(this); });
}
void Mutex::ReaderLock() {
  static const auto library = InLibrary(&Mutex::ReaderLock);
  Acquire(this, kReader, [this] { library(this); });
}
void Mutex::ReaderUnlock() {
  static const auto library = InLibrary(&Mutex::ReaderUnlock);
  Release(this, kReader, [this] { library(this); });
}
bool Mutex::ReaderTryLock() {
  static const auto library = InLibrary(&Mutex::ReaderTryLock);
  return TryToAcquire(this, kReader, [this] { return library(this); });
}
void Mutex::LockWhen(const Condition& condition) {
  static const auto library = InLibrary(&Mutex::LockWhen);
  Acquire(this, 0, [&] { library(this, condition); });
}
void Mutex::Await(const Condition& condition) {
  static const auto library = InLibrary(&Mutex::Await);
  Wait(this, [&] { library(this, condition); });
}
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static const auto library = InLibrary(&Mutex::AwaitWithTimeout);
  return Wait(this, [&] { return library(this, condition, timeout); });
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static const auto library = InLibrary(&Mutex::AwaitWithDeadline);
  return Wait(this, [&] { return library(this, condition, deadline); });
}
// Whoever finds that it has been notified doesn't take its lock.
void Notification::Notify() {
  static const auto library = InLibrary(&Notification::Notify);
  __tsan_release(this);
  library(this);
}
void Notification::WaitForNotification() const {
  static const auto library = InLibrary(&Notification::WaitForNotification);
  library(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

// gRPC waits so.
void CondVar::Wait(Mutex* mutex) {
  static const auto library = InLibrary(&CondVar::Wait);
  ::Wait(mutex, [&] { library(this, mutex); });
}
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto library = InLibrary(&CondVar::WaitWithTimeout);
  return ::Wait(mutex, [&] { return library(this, mutex, timeout); });
}
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto library = InLibrary(&CondVar::WaitWithDeadline);
  return ::Wait(mutex, [&] { return library(this, mutex, deadline); });
}
ABSL_NAMESPACE_END
}  // namespace absl
