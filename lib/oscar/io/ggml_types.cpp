// The table of types and the layout of each block. Bytes are little-endian; products and sums are
// rounded to fp32 one by one, in the order written here.
#include "oscar/io/ggml_types.h"

#include <array>
#include <cstring>

#include "oscar/cache/numeric.h"

namespace oscar {
namespace {

constexpr int kBlock = 32;       // values in a block of the older types
constexpr int kSuper = 256;      // values in a block of the K types
constexpr int kScaleBytes = 12;  // of packed 6-bit scales

uint8_t byte_at(const std::byte* data, int index) { return std::to_integer<uint8_t>(data[index]); }

float half_at(const std::byte* data, int offset) {
  uint16_t bits;
  std::memcpy(&bits, data + offset, sizeof bits);
  return fp16_to_float(bits);
}

// The lower or upper half of a byte.
int nibble(uint8_t byte, bool upper) { return upper ? byte >> 4 : byte & 15; }

void decode_f32(const std::byte* block, float* out) { std::memcpy(out, block, sizeof *out); }
void decode_f16(const std::byte* block, float* out) { *out = half_at(block, 0); }
void decode_bf16(const std::byte* block, float* out) {
  uint16_t bits;
  std::memcpy(&bits, block, sizeof bits);
  *out = bf16_to_float(bits);
}

// d, 32 signed bytes.
void decode_q8_0(const std::byte* block, float* out) {
  const float d = half_at(block, 0);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = static_cast<float>(static_cast<int8_t>(byte_at(block, 2 + i))) * d;
  }
}

// Halves of bytes: the first 16 values are the lower ones.
int half_block_code(const std::byte* codes, int i) {
  return nibble(byte_at(codes, i % (kBlock / 2)), i >= kBlock / 2);
}

// d, 16 bytes of codes about 8.
void decode_q4_0(const std::byte* block, float* out) {
  const float d = half_at(block, 0);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = d * static_cast<float>(half_block_code(block + 2, i) - 8);
  }
}

// d, minimum, 16 bytes of codes.
void decode_q4_1(const std::byte* block, float* out) {
  const float d = half_at(block, 0), minimum = half_at(block, 2);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = d * static_cast<float>(half_block_code(block + 4, i)) + minimum;
  }
}

// Four bits, and a fifth in a word of 32.
int five_bit_code(const std::byte* high, const std::byte* codes, int i) {
  return half_block_code(codes, i) | ((byte_at(high, i / 8) >> (i % 8) & 1) << 4);
}

// d, fifth bits, 16 bytes of codes about 16.
void decode_q5_0(const std::byte* block, float* out) {
  const float d = half_at(block, 0);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = d * static_cast<float>(five_bit_code(block + 2, block + 6, i) - 16);
  }
}

// d, minimum, fifth bits, 16 bytes of codes.
void decode_q5_1(const std::byte* block, float* out) {
  const float d = half_at(block, 0), minimum = half_at(block, 2);
  for (int i = 0; i < kBlock; ++i) {
    out[i] = d * static_cast<float>(five_bit_code(block + 4, block + 8, i)) + minimum;
  }
}

using Levels = std::array<int8_t, 16>;
constexpr Levels kUnevenLevels = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
// E2M1, doubled.
constexpr Levels kFloatLevels = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// 16 bytes of codes that name a level.
void decode_levels(const std::byte* codes, float scale, const Levels& levels, float* out) {
  for (int i = 0; i < kBlock; ++i) {
    out[i] = scale * static_cast<float>(levels[static_cast<size_t>(half_block_code(codes, i))]);
  }
}

// d, codes.
void decode_iq4_nl(const std::byte* block, float* out) {
  decode_levels(block + 2, half_at(block, 0), kUnevenLevels, out);
}

// d, 2 bytes and 4 of eight 6-bit scales about 32 (upper two bits, lower four), codes.
void decode_iq4_xs(const std::byte* block, float* out) {
  const float d = half_at(block, 0);
  for (int group = 0; group < kSuper / kBlock; ++group) {
    const int high = byte_at(block, 2 + group / 4) >> (group % 4 * 2) & 3;
    const int low = nibble(byte_at(block, 4 + group / 2), group % 2 == 1);
    decode_levels(block + 8 + group * kBlock / 2, d * static_cast<float>((low | high << 4) - 32),
                  kUnevenLevels, out + group * kBlock);
  }
}

// An exponent (E8M0, as the scale of doubled levels: 2^(e - 128)), codes.
void decode_mxfp4(const std::byte* block, float* out) {
  const uint32_t exponent = byte_at(block, 0);
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  decode_levels(block + 1, scale, kFloatLevels, out);
}

// Digit `plane` of five (or four) in base 3, of which a byte holds the fraction times 256; about 1.
float ternary(uint8_t byte, int plane) {
  constexpr std::array<uint8_t, 5> kPowers = {1, 3, 9, 27, 81};
  const auto shifted = static_cast<uint8_t>(byte * kPowers[static_cast<size_t>(plane)]);
  return static_cast<float>((shifted * 3 >> 8) - 1);
}

// 32 bytes of five planes of 32 digits, 16 of five of 16, 4 of four of 4; d.
void decode_tq1_0(const std::byte* block, float* out) {
  struct Run {
    int bytes, planes;
  };
  const float d = half_at(block, 52);
  for (const Run run : {Run{32, 5}, {16, 5}, {4, 4}}) {
    for (int i = 0; i < run.bytes * run.planes; ++i) {
      *out++ = d * ternary(byte_at(block, i % run.bytes), i / run.bytes);
    }
    block += run.bytes;
  }
}

// Two bits of value i: of each 32 bytes, first the lowest two bits of all, then the next two.
int two_bit_code(const std::byte* codes, int i) {
  return byte_at(codes, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3;
}

// Bit i / 32 of byte i % 32.
int one_bit_code(const std::byte* codes, int i) { return byte_at(codes, i % 32) >> (i / 32) & 1; }

// 64 bytes of codes about 1, d.
void decode_tq2_0(const std::byte* block, float* out) {
  const float d = half_at(block, 64);
  for (int i = 0; i < kSuper; ++i) out[i] = d * static_cast<float>(two_bit_code(block, i) - 1);
}

// 16 bytes of scale and minimum in 4 bits each, 64 of codes, d, d of the minima.
void decode_q2_k(const std::byte* block, float* out) {
  const float d = half_at(block, 80), d_minimum = half_at(block, 82);
  for (int i = 0; i < kSuper; ++i) {
    const uint8_t packed = byte_at(block, i / 16);
    const float scale = d * static_cast<float>(packed & 15);
    const float minimum = d_minimum * static_cast<float>(packed >> 4);
    out[i] = scale * static_cast<float>(two_bit_code(block + 16, i)) - minimum;
  }
}

// 32 bytes of third bits, 64 of codes, 12 of sixteen 6-bit scales about 32, d. A third bit that is
// not set takes 4 off.
void decode_q3_k(const std::byte* block, float* out) {
  const std::byte* scales = block + 96;
  const float d = half_at(block, 108);
  for (int group = 0; group < kSuper / 16; ++group) {
    const int low = nibble(byte_at(scales, group % 8), group >= 8);
    const int high = byte_at(scales, 8 + group % 4) >> (group / 4 * 2) & 3;
    const float scale = d * static_cast<float>((low | high << 4) - 32);
    for (int i = group * 16; i < group * 16 + 16; ++i) {
      const int code = two_bit_code(block + 32, i) - (one_bit_code(block, i) == 0 ? 4 : 0);
      out[i] = scale * static_cast<float>(code);
    }
  }
}

struct ScaleAndMinimum {
  int scale, minimum;
};

// Eight pairs of 6-bit numbers: four in the lower bits of bytes 0 to 7; of the others four bits in
// bytes 8 to 11 and two at the top of the first eight.
ScaleAndMinimum packed_scale(const std::byte* packed, int index) {
  if (index < 4) return {byte_at(packed, index) & 63, byte_at(packed, index + 4) & 63};
  const uint8_t low = byte_at(packed, index + 4);
  return {(low & 15) | (byte_at(packed, index - 4) >> 6) << 4,
          (low >> 4) | (byte_at(packed, index) >> 6) << 4};
}

// d, d of the minima, 12 bytes of scales and minima, fifth bits where there are any, 128 of codes:
// of each 32 bytes first the lower halves.
void decode_q45_k(const std::byte* block, const std::byte* fifth_bits, const std::byte* codes,
                  float* out) {
  const float d = half_at(block, 0), d_minimum = half_at(block, 2);
  for (int group = 0; group < kSuper / 32; ++group) {
    const ScaleAndMinimum packed = packed_scale(block + 4, group);
    const float scale = d * static_cast<float>(packed.scale);
    const float minimum = d_minimum * static_cast<float>(packed.minimum);
    for (int i = group * 32; i < group * 32 + 32; ++i) {
      int code = nibble(byte_at(codes, group / 2 * 32 + i % 32), group % 2 == 1);
      if (fifth_bits != nullptr) code |= one_bit_code(fifth_bits, i) << 4;
      out[i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

void decode_q4_k(const std::byte* block, float* out) {
  decode_q45_k(block, nullptr, block + 4 + kScaleBytes, out);
}

void decode_q5_k(const std::byte* block, float* out) {
  const std::byte* fifth_bits = block + 4 + kScaleBytes;
  decode_q45_k(block, fifth_bits, fifth_bits + kSuper / 8, out);
}

// 128 bytes of lower bits (of each 64 bytes first the lower halves), 64 of upper ones, 16 signed
// scales, d; codes about 32.
void decode_q6_k(const std::byte* block, float* out) {
  const float d = half_at(block, 208);
  for (int i = 0; i < kSuper; ++i) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(byte_at(block, 192 + i / 16)));
    const int low = nibble(byte_at(block, i / 128 * 64 + i % 64), i % 128 >= 64);
    const int code = low | two_bit_code(block + 128, i) << 4;
    out[i] = scale * static_cast<float>(code - 32);
  }
}

constexpr std::array kTypes = {
    GgmlType{0, "F32", 1, 4, decode_f32},
    GgmlType{1, "F16", 1, 2, decode_f16},
    GgmlType{2, "Q4_0", kBlock, 18, decode_q4_0},
    GgmlType{3, "Q4_1", kBlock, 20, decode_q4_1},
    GgmlType{6, "Q5_0", kBlock, 22, decode_q5_0},
    GgmlType{7, "Q5_1", kBlock, 24, decode_q5_1},
    GgmlType{8, "Q8_0", kBlock, 34, decode_q8_0},
    GgmlType{10, "Q2_K", kSuper, 84, decode_q2_k},
    GgmlType{11, "Q3_K", kSuper, 110, decode_q3_k},
    GgmlType{12, "Q4_K", kSuper, 144, decode_q4_k},
    GgmlType{13, "Q5_K", kSuper, 176, decode_q5_k},
    GgmlType{14, "Q6_K", kSuper, 210, decode_q6_k},
    GgmlType{16, "IQ2_XXS", kSuper, 66, nullptr},
    GgmlType{17, "IQ2_XS", kSuper, 74, nullptr},
    GgmlType{18, "IQ3_XXS", kSuper, 98, nullptr},
    GgmlType{19, "IQ1_S", kSuper, 50, nullptr},
    GgmlType{20, "IQ4_NL", kBlock, 18, decode_iq4_nl},
    GgmlType{21, "IQ3_S", kSuper, 110, nullptr},
    GgmlType{22, "IQ2_S", kSuper, 82, nullptr},
    GgmlType{23, "IQ4_XS", kSuper, 136, decode_iq4_xs},
    GgmlType{24, "I8", 1, 1, nullptr},
    GgmlType{25, "I16", 1, 2, nullptr},
    GgmlType{26, "I32", 1, 4, nullptr},
    GgmlType{27, "I64", 1, 8, nullptr},
    GgmlType{28, "F64", 1, 8, nullptr},
    GgmlType{29, "IQ1_M", kSuper, 56, nullptr},
    GgmlType{30, "BF16", 1, 2, decode_bf16},
    GgmlType{34, "TQ1_0", kSuper, 54, decode_tq1_0},
    GgmlType{35, "TQ2_0", kSuper, 66, decode_tq2_0},
    GgmlType{39, "MXFP4", kBlock, 17, decode_mxfp4},
    GgmlType{40, "NVFP4", 64, 36, nullptr},
    GgmlType{41, "Q1_0", 128, 18, nullptr},
};

// Numbers that ggml gave up.
struct FormerType {
  uint32_t id;
  const char* name;
};
constexpr std::array<FormerType, 8> kFormerTypes = {{{4, "Q4_2"},
                                                     {5, "Q4_3"},
                                                     {31, "Q4_0_4_4"},
                                                     {32, "Q4_0_4_8"},
                                                     {33, "Q4_0_8_8"},
                                                     {36, "IQ4_NL_4_4"},
                                                     {37, "IQ4_NL_4_8"},
                                                     {38, "IQ4_NL_8_8"}}};

}  // namespace

const GgmlType* find_ggml_type(uint32_t id) {
  for (const GgmlType& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

std::string describe_ggml_type(uint32_t id) {
  if (const GgmlType* type = find_ggml_type(id)) return type->name;
  for (const FormerType& former : kFormerTypes) {
    if (former.id == id) return std::string(former.name) + ", which ggml has given up";
  }
  return "number " + std::to_string(id) + ", newer than this program";
}

std::string decodable_ggml_types() {
  std::string names;
  for (const GgmlType& type : kTypes) {
    if (type.decode == nullptr) continue;
    if (!names.empty()) names += ", ";
    names += type.name;
  }
  return names;
}

void decode_ggml(const GgmlType& type, const std::byte* blocks, int64_t values, float* out) {
  for (int64_t done = 0; done < values; done += type.block_values) {
    type.decode(blocks, out + done);
    blocks += type.block_bytes;
  }
}

}  // namespace oscar
