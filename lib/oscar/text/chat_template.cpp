// Documents of text files, and chats rendered by a model's template, through the Python package.
#include "oscar/text/chat_template.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/sha256.h"
#include "oscar/base/subprocess.h"

namespace oscar {

// Where Python and the package are.

namespace {

namespace fs = std::filesystem;

constexpr const char* kHint =
    "install Python 3.10 or newer with jinja2, and name it: OSCAR_PYTHON=/path/to/python";

fs::path folder_of_program() {
  std::error_code status;
  return fs::read_symlink("/proc/self/exe", status).parent_path();
}

bool is_there(const fs::path& path) {
  std::error_code status;
  return fs::exists(path, status);
}

// OSCAR_PYTHON of the .setup.env that the build's set-up wrote.
std::string python_of_setup() {
  constexpr std::string_view kBegin = "export OSCAR_PYTHON='";
  std::ifstream file(fs::path(OSCAR_SOURCE_DATASETS).parent_path() / ".setup.env");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kBegin) || !line.ends_with('\'')) continue;
    return line.substr(kBegin.size(), line.size() - kBegin.size() - 1);
  }
  return "";
}

std::string find_python() {
  if (const char* named = std::getenv("OSCAR_PYTHON"); named != nullptr && *named != '\0') {
    return named;
  }
  for (const fs::path& python : {folder_of_program() / "python3", fs::path(python_of_setup())}) {
    if (!python.empty() && is_there(python)) return python.string();
  }
  return "python3";
}

// A folder that holds the package: of a build, an installation, a wheel, or the source tree. None:
// Python has it installed.
std::optional<std::string> find_package() {
  const fs::path program = folder_of_program();
  for (const fs::path& folder :
       {program.parent_path() / "python", program.parent_path() / OSCAR_LIBRARY_FOLDER / "python",
        program.parent_path().parent_path(),
        fs::path(OSCAR_SOURCE_DATASETS).parent_path() / "python"}) {
    if (is_there(folder / "oscar_int2/commands/render.py")) return folder.string();
  }
  return std::nullopt;
}

std::vector<std::string> environment() {
  const auto package = find_package();
  if (!package) return {};
  const char* paths = std::getenv("PYTHONPATH");
  const bool more = paths != nullptr && *paths != '\0';
  return {"PYTHONPATH=" + *package + (more ? std::string(":") + paths : "")};
}

[[noreturn]] void fail(const std::string& file, const std::string& found, const std::string& hint) {
  throw Error({.what = "the text cannot be read", .where = file, .found = found, .hint = hint});
}

std::string last_line(std::string text) {
  text.erase(text.find_last_not_of(" \n\r\t") + 1);
  const size_t begin = text.rfind('\n');
  return begin == std::string::npos ? text : text.substr(begin + 1);
}

ReadDocument read_answer(const Json& line) {
  ReadDocument document;
  document.place = line.at("at").get<int64_t>();
  if (line.contains("error")) {
    document.error = line["error"].get<std::string>();
    if (document.error.empty()) document.error = "no document";
  } else {
    document.text = line.at("text").get<std::string>();
    document.is_chat = line.at("chat").get<bool>();
  }
  return document;
}

}  // namespace

std::string ChatTemplate::name() const {
  constexpr size_t kDigits = 12;
  const auto found = texts.find("default");
  const auto& text = found != texts.end() ? found : texts.begin();
  if (text == texts.end()) return "none";
  return "the model's own (" + sha256_of(text->second).substr(0, kDigits) + ")";
}

std::vector<ReadDocument> read_documents(std::string_view content, const std::string& file,
                                         const ChatTemplate& chat_template) {
  const Json request = {{"file", fs::path(file).filename().string()},
                        {"templates", chat_template.texts},
                        {"special_tokens", chat_template.special_tokens}};
  std::string input = request.dump(-1, ' ', true, Json::error_handler_t::replace) + "\n";
  input += content;
  const std::string python = find_python();
  ProgramResult result;
  try {
    result = run_program({python, "-m", "oscar_int2", "render"}, input, environment());
  } catch (const Error& error) {
    fail(file, "Python cannot be run: " + python + ": " + error.info().found, kHint);
  }
  std::vector<ReadDocument> documents;
  for (size_t begin = 0; begin < result.out.size();) {
    const size_t end = std::min(result.out.find('\n', begin), result.out.size());
    const Json line = parse_json(std::string_view(result.out).substr(begin, end - begin), python);
    begin = end + 1;
    if (line.contains("fatal")) {
      fail(file, line["fatal"].get<std::string>(), line.value("hint", ""));
    }
    if (line.contains("end")) return documents;
    documents.push_back(read_answer(line));
  }
  fail(file, python + " ended: " + last_line(result.err), kHint);
}

ChatFrame make_chat_frame(const ChatTemplate& chat_template) {
  constexpr std::string_view kPlace = "<text of the user>";  // of the rendered text, cut out again
  const Json row = {{"messages", {{{"role", "user"}, {"content", kPlace}}}},
                    {"chat_template_kwargs", {{"add_generation_prompt", true}}}};
  const std::string where = "the chat template";
  const auto documents = read_documents(row.dump(), where + ".jsonl", chat_template);
  if (documents.size() != 1 || !documents[0].error.empty()) {
    fail(where, documents.empty() ? "nothing" : documents[0].error, "");
  }
  const std::string& chat = documents[0].text;
  const size_t place = chat.find(kPlace);
  if (place == std::string::npos) fail(where, "it does not write what the user says", "");
  return {chat.substr(0, place), chat.substr(place + kPlace.size())};
}

}  // namespace oscar
