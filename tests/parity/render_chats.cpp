// The reference's other half: renders conversations from standard input.
//
//   oscar-test-render-chats TEMPLATE_SHA256
//
// Input: a line of JSON for each, {"messages": [{"role": .., "content": ..}], "prompt": bool}.
// Output: for each the rendered text as a JSON string on a line; null when the template refuses it.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/text/chat_template.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    const auto chat_template = oscar::known_chat_template(argv[1]);
    if (!chat_template) {
      std::fprintf(stderr, "unknown template\n");
      return 3;
    }
    for (std::string line; std::getline(std::cin, line);) {
      const oscar::Json item = oscar::parse_json(line, "line");
      std::vector<oscar::ChatMessage> messages;
      for (const auto& message : item.at("messages")) {
        messages.push_back({message.at("role"), message.at("content")});
      }
      const bool prompt = item.at("prompt").get<bool>();
      oscar::Json rendered;
      try {
        rendered = oscar::render_chat(*chat_template, messages, prompt);
      } catch (const oscar::Error&) {
        rendered = nullptr;
      }
      std::cout << rendered.dump() << "\n";
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
