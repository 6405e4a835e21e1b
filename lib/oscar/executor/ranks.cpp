// Keys in a TCPStore of libtorch that the first process serves.
#include "oscar/executor/ranks.h"

#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds, std::chrono::seconds;

constexpr seconds kStartPatience{120};  // until all processes have begun
constexpr milliseconds kBeat{500};
constexpr seconds kSilence{10};  // of a process that is taken for lost
constexpr seconds kFarewell{5};  // until the others have heard that the first has ended
constexpr milliseconds kPoll{5};
constexpr size_t kPieceBytes = size_t{4} << 20;  // a store takes 8 MiB at most

[[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& found) {
  throw Error({.what = "the processes of a run are not described",
               .where = std::string("environment variable ") + name,
               .expected = expected,
               .found = found,
               .hint = "start them with torchrun or --gpus"});
}

int from_environment(const char* name, int least, int most) {
  const char* text = std::getenv(name);
  const std::string expected = fmt::format("a number from {} to {}", least, most);
  if (text == nullptr) refuse(name, expected, "nothing");
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < least || value > most) refuse(name, expected, text);
  return static_cast<int>(value);
}

std::vector<uint8_t> to_bytes(const std::string& text) {
  std::vector<uint8_t> bytes(text.size());
  std::copy(text.begin(), text.end(), bytes.begin());
  return bytes;
}

std::string key_of(const char* kind, int rank) { return fmt::format("{}/{}", kind, rank); }

c10::intrusive_ptr<c10d::TCPStore> connect(const std::string& address, int port, bool serve) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = serve;
  options.waitWorkers = false;
  options.timeout = kStartPatience;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

}  // namespace

struct Ranks::Connection {
  Connection(int own, int count, const std::string& address, int port)
      : rank(own),
        size(count),
        store(connect(address, port, own == 0)),
        beats(connect(address, port, false)) {
    store->add(key_of("alive", rank), 1);
    heart = std::jthread([this](const std::stop_token& stop) { beat(stop); });
  }

  std::string name(int of) const { return fmt::format("process {} of {}", of, size); }

  // Says that this process works, and looks whether those do that it depends on: the first on all
  // others, these on the first.
  void beat(const std::stop_token& stop) {
    struct Seen {
      int64_t count = 0;
      Clock::time_point since = Clock::now();
    };
    std::map<int, Seen> watched;
    for (int other = rank == 0 ? 1 : 0; other < (rank == 0 ? size : 1); ++other) watched[other];
    std::mutex mutex;
    std::condition_variable_any pause;
    try {
      while (!stop.stop_requested()) {
        beats->add(key_of("alive", rank), 1);
        for (auto it = watched.begin(); it != watched.end();) {
          auto& [other, seen] = *it;
          if (const auto left = said(key_of("left", other))) {
            if (!left->empty()) lose(other, *left);
            it = watched.erase(it);
            continue;
          }
          const int64_t count = beats->add(key_of("alive", other), 0);
          if (count != seen.count) seen = {count, Clock::now()};
          const auto patience = count == 0 ? kStartPatience : kSilence;
          if (Clock::now() - seen.since > patience) {
            lose(other, count == 0 ? "has not begun" : "has ended");
          }
          ++it;
        }
        std::unique_lock lock(mutex);
        pause.wait_for(lock, stop, kBeat, [] { return false; });
      }
    } catch (const std::exception&) {  // no store any more
      if (!stop.stop_requested()) lose(0, "has ended");
    }
  }

  std::optional<std::string> said(const std::string& key) {
    if (!beats->check({key})) return std::nullopt;
    const std::vector<uint8_t> bytes = beats->get(key);
    return std::string(bytes.begin() + 1, bytes.end());  // a value is never empty
  }

  void lose(int other, const std::string& how) {
    const std::lock_guard lock(guard);
    if (how == kStopped) return request_stop();
    if (!lost.empty()) return;
    first_failed = other == 0 && how == kFailed;
    lost = fmt::format("{} {}", name(other), how);
    request_stop();
  }

  void stop_if_lost() {
    const std::lock_guard lock(guard);
    if (!lost.empty()) throw Error({.what = lost});
  }

  // Until `done()`; throws Error when a process is lost, Interrupted when a stop was requested.
  template <typename Done>
  void wait(const Done& done) {
    while (!done()) {
      stop_if_lost();
      stop_if_requested();
      std::this_thread::sleep_for(kPoll);
    }
  }

  // Calls to the store, whose errors mean that the first process, which serves it, has gone.
  template <typename Call>
  auto ask(const Call& call) {
    try {
      return call(*store);
    } catch (const std::exception&) {
      lose(0, "has ended");
      stop_if_lost();
      throw;
    }
  }

  std::vector<uint8_t> take(const std::string& key, bool remove) {
    wait([&] { return ask([&](c10d::TCPStore& s) { return s.check({key}); }); });
    return ask([&](c10d::TCPStore& s) {
      std::vector<uint8_t> bytes = s.get(key);
      if (remove) s.deleteKey(key);
      return bytes;
    });
  }

  std::string mail(int from) { return fmt::format("mail/{}/{}", from, mails[from]++); }

  void leave(const std::string& how) {
    if (std::exchange(has_left, true)) return;
    try {
      store->set(key_of("left", rank), to_bytes("." + how));
      const auto everyone_heard = [&] {
        for (int other = 1; other < size; ++other) {
          if (!store->check({key_of("left", other)})) return false;
        }
        return true;
      };
      for (const auto end = Clock::now() + kFarewell;
           rank == 0 && Clock::now() < end && !everyone_heard();) {
        std::this_thread::sleep_for(kPoll);
      }
    } catch (const std::exception&) {  // nobody listens any more
    }
  }

  static constexpr const char *kFailed = "has failed", *kStopped = "was asked to stop";

  const int rank, size;
  c10::intrusive_ptr<c10d::TCPStore> store, beats;  // a call blocks others of its store
  std::map<int, int64_t> mails;                     // pieces so far, by sender
  std::string last_sent;
  bool has_left = false;
  mutable std::mutex guard;
  std::string lost;
  bool first_failed = false;
  std::jthread heart;  // ends before what it uses
};

Ranks::Ranks() {
  if (std::getenv("WORLD_SIZE") == nullptr) return;
  constexpr int kMostProcesses = 8, kMostPort = 65535;
  size_ = from_environment("WORLD_SIZE", 1, kMostProcesses);
  rank_ = from_environment("RANK", 0, size_ - 1);
  if (size_ == 1) return;
  ::setenv("TORCH_CPP_LOG_LEVEL", "FATAL", 0);  // a lost connection is told by us
  c10::initLogging();
  local_rank_ = from_environment("LOCAL_RANK", 0, size_ - 1);
  const bool told = std::getenv("LOCAL_WORLD_SIZE") != nullptr;
  local_size_ = told ? from_environment("LOCAL_WORLD_SIZE", 1, size_) : size_;
  const char* address = std::getenv("MASTER_ADDR");
  if (address == nullptr) refuse("MASTER_ADDR", "the host of the first process", "nothing");
  const int port = from_environment("MASTER_PORT", 1, kMostPort);
  try {
    connection_ = std::make_unique<Connection>(rank_, size_, address, port);
  } catch (const c10::Error& error) {
    throw Error({.what = first() ? "cannot listen for the other processes"
                                 : "the first process does not answer",
                 .where = fmt::format("{}:{}", address, port),
                 .found = error.what_without_backtrace()});
  }
}

Ranks::~Ranks() {
  if (!connection_) return;
  const bool failed = std::uncaught_exceptions() > 0;
  connection_->leave(!failed                 ? ""
                     : interrupt_requested() ? Connection::kStopped
                                             : Connection::kFailed);
}

std::string Ranks::own_device(const std::string& device) const {
  return several() && device == "cuda" ? fmt::format("cuda:{}", local_rank_) : device;
}

void Ranks::publish(const std::vector<uint8_t>& bytes) {
  if (several()) connection_->store->set("published", bytes);
}

std::vector<uint8_t> Ranks::published() { return connection_->take("published", false); }

void Ranks::send(const std::vector<uint8_t>& bytes) {
  Connection& connection = *connection_;
  size_t begin = 0;
  do {
    const size_t end = std::min(begin + kPieceBytes, bytes.size());
    std::vector<uint8_t> piece(1 + end - begin);
    piece[0] = end == bytes.size() ? 1 : 0;
    std::copy_n(bytes.data() + begin, end - begin, piece.data() + 1);
    connection.last_sent = connection.mail(rank_);
    connection.ask([&](c10d::TCPStore& store) {
      store.set(connection.last_sent, piece);
      return true;
    });
    begin = end;
  } while (begin < bytes.size());
}

void Ranks::wait_until_taken() {
  Connection& connection = *connection_;
  if (connection.last_sent.empty()) return;
  connection.wait([&] {
    return connection.ask(
        [&](c10d::TCPStore& store) { return !store.check({connection.last_sent}); });
  });
}

std::vector<uint8_t> Ranks::receive(int from) {
  std::vector<uint8_t> bytes;
  for (bool last = false; !last;) {
    const std::vector<uint8_t> piece = connection_->take(connection_->mail(from), true);
    last = piece.at(0) != 0;
    bytes.insert(bytes.end(), piece.begin() + 1, piece.end());
  }
  return bytes;
}

void Ranks::report(const std::string& error) {
  connection_->leave(std::string(Connection::kFailed) + ": " + error);
}

void Ranks::stopped() { connection_->leave(Connection::kStopped); }

std::string Ranks::lost() const {
  if (!connection_) return "";
  const std::lock_guard lock(connection_->guard);
  return connection_->lost;
}

bool Ranks::first_failed() const {
  if (!connection_) return false;
  const std::lock_guard lock(connection_->guard);
  return connection_->first_failed;
}

}  // namespace oscar
