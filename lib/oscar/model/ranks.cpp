// The processes of a run, and what they tell each other.
#include "oscar/model/ranks.h"

#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/version.h"

namespace oscar {

// Keys in a TCPStore of libtorch that the first process serves.

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds, std::chrono::seconds;

constexpr seconds kStartPatience{120};  // until all processes have begun
constexpr milliseconds kBeat{500};
constexpr seconds kSilence{10};  // of a process that is taken for lost
constexpr seconds kFarewell{5};  // until the others have heard that the first has ended
constexpr milliseconds kPoll{5};
constexpr size_t kStoreBytes = size_t{4} << 20;  // a store takes 8 MiB at most

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

bool listens(const addrinfo& to) {
  const int fd = ::socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC, to.ai_protocol);
  if (fd < 0) return false;
  // A request to stop is heard between attempts.
  const timeval patience{.tv_sec = 1, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  const bool connected = ::connect(fd, to.ai_addr, to.ai_addrlen) == 0;
  ::close(fd);
  return connected;
}

// For a while, until the first process listens: after an attempt in vain, libtorch sleeps for half
// a second.
void wait_for_listener(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* resolved = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &resolved) != 0) return;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> places(resolved, &::freeaddrinfo);
  for (const auto end = Clock::now() + seconds(2); Clock::now() < end;) {
    for (const addrinfo* to = places.get(); to != nullptr; to = to->ai_next) {
      if (listens(*to)) return;
    }
    stop_if_requested();
    std::this_thread::sleep_for(kPoll);
  }
}

c10::intrusive_ptr<c10d::TCPStore> connect(const std::string& address, int port, bool serve) {
  if (!serve) wait_for_listener(address, port);
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

  // Until `done()`; throws Interrupted when a stop was requested, or a process is lost.
  template <typename Done>
  void wait(const Done& done) {
    while (!done()) {
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
      stop_if_requested();
      throw;
    }
  }

  std::vector<uint8_t> take(const std::string& key) {
    wait([&] { return ask([&](c10d::TCPStore& s) { return s.check({key}); }); });
    return ask([&](c10d::TCPStore& s) {
      std::vector<uint8_t> bytes = s.get(key);
      s.deleteKey(key);
      return bytes;
    });
  }

  // The key of the next piece.
  std::string mail(int from, int to) {
    return fmt::format("mail/{}/{}/{}", from, to, mails[{from, to}]);
  }

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
  std::map<std::pair<int, int>, int64_t> mails;     // pieces so far, by sender and receiver
  std::map<int, std::string> last_sent;             // key, by receiver
  bool has_left = false;
  mutable std::mutex guard;
  std::string lost;
  bool first_failed = false;
  std::jthread heart;  // ends before what it uses
};

Ranks::Ranks() {
  if (std::getenv("WORLD_SIZE") == nullptr) return;
  constexpr int kMostPort = 65535;
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

Json Ranks::agree(const std::string& run_key, const Json& start) {
  if (!several()) return start;
  const Json own = {kToolVersion, kToolCommit, run_key};
  if (first()) {
    send_to_all(Json::to_cbor({own, start}));
    return start;
  }
  const Json told = Json::from_cbor(receive(0));
  if (told.at(0) != own) {
    throw Error({.what = "this process would do another run than the first",
                 .hint = "give all of them the same version, options, files and kind of device"});
  }
  return told.at(1);
}

void Ranks::send(int to, const std::vector<uint8_t>& bytes) {
  Connection& connection = *connection_;
  size_t begin = 0;
  do {
    const size_t end = std::min(begin + kStoreBytes, bytes.size());
    std::vector<uint8_t> piece(1 + end - begin);
    piece[0] = end == bytes.size() ? 1 : 0;
    std::copy_n(bytes.data() + begin, end - begin, piece.data() + 1);
    const std::string key = connection.mail(rank_, to);
    ++connection.mails[{rank_, to}];
    connection.ask([&](c10d::TCPStore& store) {
      store.set(key, piece);
      return true;
    });
    connection.last_sent[to] = key;
    begin = end;
  } while (begin < bytes.size());
}

void Ranks::send_to_all(const std::vector<uint8_t>& bytes) {
  for (int other = 1; other < size_; ++other) send(other, bytes);
}

void Ranks::wait_until_taken() {
  if (!several()) return;
  Connection& connection = *connection_;
  for (const auto& sent : connection.last_sent) {
    const auto taken = [&](c10d::TCPStore& store) { return !store.check({sent.second}); };
    connection.wait([&] { return connection.ask(taken); });
  }
}

std::vector<uint8_t> Ranks::receive(int from) {
  std::vector<uint8_t> bytes;
  for (bool last = false; !last;) {
    const std::vector<uint8_t> piece = connection_->take(connection_->mail(from, rank_));
    ++connection_->mails[{from, rank_}];
    last = piece.at(0) != 0;
    bytes.insert(bytes.end(), piece.begin() + 1, piece.end());
  }
  return bytes;
}

bool Ranks::arrived(int from) {
  return connection_->ask(
      [&](c10d::TCPStore& store) { return store.check({connection_->mail(from, rank_)}); });
}

void Ranks::done() {
  if (several()) connection_->leave("");
}

void Ranks::failed() {
  if (several()) connection_->leave(Connection::kFailed);
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
