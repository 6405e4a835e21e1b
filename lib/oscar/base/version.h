// What this build is: release number and source revision, as written into every artefact.
#pragma once

namespace oscar {

// Defined in a source that each build writes anew (cmake/OscarVersion.cmake), so that a new commit
// compiles one file.
extern const char* const kToolVersion;
extern const char* const kToolCommit;

}  // namespace oscar
