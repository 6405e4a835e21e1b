// What a cached value takes: this toolkit's rows at any width, and other projects' codecs with the
// tokens and layers that they keep exact.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "oscar/cache/codec.h"

namespace oscar {

// Bits of a value of a coded row with its scales and zeros; `code_bits` of them are its code.
double row_bits(const RowFormat& format, int code_bits);

// bits_per_element (cache/codec.h) of rows that take `row_bits` a value.
double bits_per_element(double row_bits, int64_t length, int64_t sink, int64_t recent);

// Bits of a value of a coded row, scales included: what each value takes, and what is stored once
// for each row of head_dim values.
struct RivalBits {
  double of_value = 0, of_row = 0;

  double at(int head_dim) const { return of_value + of_row / head_dim; }
};

struct RivalFormat {
  const char* name;
  const char* summary;  // the definition in one line
  const char* source;   // whose it is, and how it is asked for there
  RivalBits key, value;
  // As its authors ship it: tokens and layers that stay in 16 bits.
  int sink_tokens = 0, recent_tokens = 0;
  int tile_tokens = 1;   // tokens that are coded together, and leave the recent window together
  int exact_layers = 0;  // so many first and last layers, at most half of all
};

// In the order of bits. How rows are coded: eval/rival_codecs.h.
std::span<const RivalFormat> rival_formats();

// Null for a name that none has.
const RivalFormat* find_rival(std::string_view name);

// Whether `layer` of `num_layers` stays exact in the codec as it is shipped.
bool is_exact_layer(const RivalFormat& rival, int layer, int num_layers);

// Tokens that are exact on average behind the sink: the recent window, and half of a tile that is
// still filling.
int mean_recent_tokens(const RivalFormat& rival);

}  // namespace oscar
